"""The files a run leaves in its folder, and the check that none is missing at the end."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from fp4_plugin.errors import ConfigError, MismatchError
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
    def reports(self) -> list[Path]:
        return [self.path / f"report.{suffix}" for suffix in ("json", "csv", "md")]

    def prepare(self) -> None:
        """Make the folder, and remove what an earlier run left, so that nothing stale passes.

        Raises ConfigError if the folder holds such names and no run has left its mark there.
        """
        files = (self.losses, self.manifest, self.curves, *self.reports)
        folders = (self.export, self.monitor)
        foreign = [entry.name for entry in (*files, *folders) if entry.exists()]
        if foreign and not (self.options.exists() or self.ds_config.exists()):
            raise ConfigError(
                f"--output {self.path}: holds {foreign}, which would be replaced, but nothing says "
                "that fp4 pretrain made it; choose another folder"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for file in (self.ds_config, *files):
                file.unlink(missing_ok=True)
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError as error:
            raise ConfigError(f"--output {self.path}: {error.strerror}") from error

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
