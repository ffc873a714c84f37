"""The files a run leaves in its folder, and the check that none is missing at the end."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fp4_plugin.errors import ConfigError, MismatchError
from fp4_plugin.pretrain.options import PretrainOptions
from fp4_plugin.telemetry.manifest import MANIFEST_NAME

__all__ = ["RunFolder"]


@dataclass(frozen=True)
class RunFolder:
    """Names inside `path`, the folder given with --output."""

    path: Path

    @property
    def options(self) -> Path:
        return self.path / "options.json"

    @property
    def ds_config(self) -> Path:
        return self.path / "ds_config.json"

    @property
    def losses(self) -> Path:
        return self.path / "losses.csv"

    @property
    def manifest(self) -> Path:
        return self.path / MANIFEST_NAME

    @property
    def curves(self) -> Path:
        return self.path / "curves.png"

    @property
    def export(self) -> Path:
        return self.path / "export"

    @property
    def monitor(self) -> Path:
        return self.path / "monitor"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def twin_checkpoints(self) -> Path:
        return self.path / "checkpoints_bf16_twin"

    @property
    def reports(self) -> list[Path]:
        return [self.path / f"report.{suffix}" for suffix in ("json", "csv", "md")]

    def prepare(self, inputs: Iterable[Path] = (), *, resuming: bool = False) -> None:
        """Make the folder, and remove what an earlier run left, so that nothing stale passes.

        resuming: only what comes at the end of a run is removed. Raises ConfigError, before
        anything is removed, if one of `inputs` would go with it, if there are checkpoints and they
        are not resumed, or files of these names in a folder that no run of ours has left.
        """
        if not resuming:
            self._refuse_checkpoints()
        names = self._left_at_the_end() if resuming else self._left_by_a_run()
        found = [path for path in names if path.exists()]
        lost = [str(path) for path in inputs if _is_inside(path, found)]
        if lost:
            raise ConfigError(
                f"--output {self.path}: the run reads {', '.join(lost)}, which it would replace; "
                "copy it elsewhere, or choose another folder"
            )
        if found and not (self.options.is_file() or self.manifest.is_file()):
            replaced = ", ".join(path.name for path in found)
            raise ConfigError(
                f"--output {self.path}: {replaced} would be replaced, and no run of fp4 pretrain "
                "has left it there; choose another folder"
            )
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)
            for path in found:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    def _refuse_checkpoints(self) -> None:
        """They took long to make: only a person removes them."""
        for folder in (self.checkpoints, self.twin_checkpoints):
            found = [p.name for p in folder.glob("*") if p.is_dir()]
            tags = sorted(name for name in found if not name.startswith(".fp4_saving."))
            if tags:
                raise ConfigError(
                    f"--output {self.path} has checkpoints of an earlier run ({folder.name}/"
                    f"{tags[-1]}): go on from them with --resume latest, choose another folder, or "
                    "remove them"
                )

    def write_options(self, options: PretrainOptions) -> None:
        """For the ranks, and as the sign by which `prepare` knows a folder of ours."""
        with self.writing():
            self.options.write_text(options.to_json() + "\n", encoding="utf-8")

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Inside the block, a full or read-only disk is a ConfigError, not a traceback."""
        try:
            yield
        except ConnectionError:
            raise  # a broken pipe or a lost peer, no matter of this folder
        except OSError as error:
            raise ConfigError(f"--output {self.path}: {error.strerror or error}") from error

    def _left_by_a_run(self) -> list[Path]:
        files = [self.ds_config, self.losses, self.manifest, *self._left_at_the_end()]
        return [*files, self.export, self.monitor, self.checkpoints, self.twin_checkpoints]

    def _left_at_the_end(self) -> list[Path]:
        return [self.curves, *self.reports]

    def require(self, *, manifest: bool, twin: bool, export: bool) -> None:
        """Raise MismatchError that names every expected file that is missing or empty."""
        expected = [self.ds_config, self.losses, *self.reports]
        expected += [self.manifest] * manifest + [self.curves] * twin
        expected += [self.export / "config.json"] * export
        missing = [str(file) for file in expected if not file.is_file() or not file.stat().st_size]
        if export and not list(self.export.glob("*.safetensors")):
            missing.append(str(self.export / "*.safetensors"))
        if missing:
            raise MismatchError(f"the run ended without {', '.join(missing)}")


def _is_inside(path: Path, folders: Iterable[Path]) -> bool:
    """Whether `path` is one of `folders` (or files), or lies in one."""
    return any(path.resolve().is_relative_to(folder.resolve()) for folder in folders)
