"""`engine.load_checkpoint`, which refuses what is damaged or another run's before it changes
anything.

Without a tag it loads what `latest` names, and the last good checkpoint where that is damaged. The
ranks share the reading of checksums. A checkpoint without a manifest (DeepSpeed's own, an older
release's) is loaded with a warning, unless it is cut off or empty.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4_plugin.checkpoint import Manifest, committed, find_folder, read_latest, restore_rng
from fp4_plugin.checkpoint.verification import inspect_files, verify_files, verify_names
from fp4_plugin.errors import CheckpointError
from fp4_plugin.integrations.deepspeed.agreement import common_problem, gather
from fp4_plugin.integrations.deepspeed.checkpoint_facts import (
    FRAMEWORK,
    converted_states,
    other_layout,
    other_model,
    other_recipe,
)
from fp4_plugin.integrations.deepspeed.checkpoint_ranks import (
    EngineCheckpoints,
    do_together,
    gather_parameters_again,
    require_equal,
    without_peers,
)
from fp4_plugin.integrations.deepspeed.checkpoint_saving import RNG_FILE
from fp4_plugin.integrations.deepspeed.timeouts import device_of
from fp4_plugin.integrations.deepspeed.universal_checkpoint import (
    LATEST,
    bare_tensors_named,
    named_tensors_bared,
    original_path,
    readable_by_stage,
)

__all__ = ["Loader"]

logger = logging.getLogger("fp4_plugin")

_RECIPE_REMEDY = (
    'Give the "fp4" section these values; or set "on_mismatch": "warn" in it to go on with other '
    "arithmetic; or load the weights alone (load_module_only=True)"
)
_HALF_LOADED = (
    "DeepSpeed could not load the checkpoint, and the engine may be half loaded: build a new one "
    "before you go on. "
)


@dataclass(frozen=True)
class _Request:
    """What the caller asks for. is_resumption: optimizer states are to be loaded too."""

    load_dir: Path
    tag: str | None
    is_strict: bool
    is_resumption: bool

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> _Request:
        tag = arguments.get("tag")
        module_only = arguments.get("load_module_only", False)
        custom = arguments.get("custom_load_fn") is not None
        return cls(
            load_dir=Path(arguments["load_dir"]),
            tag=None if tag is None else str(tag),
            is_strict=arguments.get("load_module_strict", True) and not custom,
            is_resumption=arguments.get("load_optimizer_states", True) and not module_only,
        )


@dataclass(frozen=True)
class _Choice:
    """The checkpoint to load; manifest is None where nobody knows what it should be."""

    folder: Path
    manifest: Manifest | None


class Loader(EngineCheckpoints):
    """Loads checkpoints into one engine."""

    def load(self, original: Any, arguments: Mapping[str, Any]) -> tuple[Any, Any]:
        """Load as DeepSpeed would with these `arguments`. Raises CheckpointError on every rank."""
        with without_peers("loading a checkpoint"):
            if self._engine.load_universal_checkpoint():
                self._warn("a universal checkpoint carries no checksums: it is loaded unverified")
                return self._load_universal(original, arguments)
            request = _Request.of(arguments)
            choice = self._choose(request)
            if choice is None:
                return self._call(original, arguments)  # DeepSpeed says that there is none
            has_same_layout = self._accept(choice, request)
            tag = choice.folder.relative_to(request.load_dir).as_posix()
            result = self._call(original, {**arguments, "tag": tag})
            self._restore(choice, request, has_same_layout)
            return result

    def _load_universal(self, original: Any, arguments: Mapping[str, Any]) -> tuple[Any, Any]:
        load_dir, tag = Path(arguments["load_dir"]), arguments.get("tag")
        tag = read_latest(load_dir, LATEST) if tag is None else str(tag)
        if tag is None:
            return self._call(original, arguments)  # DeepSpeed says that there is none
        stage = self._engine.zero_optimization_stage()
        with tempfile.TemporaryDirectory(prefix="fp4_universal_") as name:
            scratch = Path(name)
            found = do_together(
                lambda: readable_by_stage(stage, load_dir, tag, scratch), self._groups
            )
            is_from_zero3 = found == scratch and stage < 3
            parameters = self._engine.module.parameters() if is_from_zero3 else iter(())
            with (
                bare_tensors_named(parameters, scratch),
                named_tensors_bared(self._engine.optimizer, scratch),
            ):
                request = {**arguments, "load_dir": str(found), "tag": tag}
                path, state = self._call(original, request)
            return original_path(path, scratch), state

    def _call(self, original: Any, arguments: Mapping[str, Any]) -> tuple[Any, Any]:
        def load() -> tuple[Any, Any]:
            try:
                return original(**arguments)
            except Exception:
                gather_parameters_again(self._engine)
                raise

        result = do_together(load, self._groups, _HALF_LOADED)
        require_equal("presence", self._gather(result[0] is not None))
        return result

    def _gather(self, value: Any) -> dict[int, Any]:
        return gather(value, self._groups)

    def _choose(self, request: _Request) -> _Choice | None:
        """A checkpoint that is as it was written; None if there is none and none was named."""
        require_equal("tag", self._gather(request.tag))
        latest = do_together(lambda: read_latest(request.load_dir), self._groups)
        # Without a shared file system only the first rank may have it.
        latest = next((one for one in self._gather(latest).values() if one is not None), None)
        tag = latest if request.tag is None else request.tag
        if tag is None:
            return self._fall_back(request, "'latest' is missing", except_for="")
        folder = find_folder(request.load_dir, tag)
        try:
            return self._verified(folder)
        except CheckpointError as error:
            if request.tag is None:
                choice = self._fall_back(request, str(error), except_for=folder.name)
                if choice is not None:
                    return choice
                remedy = f"no other checkpoint in {request.load_dir} is good"
            else:
                found = self._last_good(request.load_dir, except_for=folder.name)
                remedy = (
                    f"no other checkpoint in {request.load_dir} is good"
                    if found is None
                    else f"the last good one is tag={found.folder.name!r}"
                )
            raise CheckpointError(f"{error}\n{remedy}") from error

    def _fall_back(self, request: _Request, reason: str, except_for: str) -> _Choice | None:
        choice = self._last_good(request.load_dir, except_for)
        if choice is not None:
            self._warn(
                f"THE LATEST CHECKPOINT IS NOT USED: {reason}\nLoading the last good one instead: "
                f"{choice.folder}"
            )
        return choice

    def _last_good(self, load_dir: Path, except_for: str) -> _Choice | None:
        """Newest first, as rank 0 sees them; every rank verifies its share."""
        names = [folder.name for folder in committed(load_dir)] if self._leads() else []
        listed = next(iter(self._gather(names).values()))
        for name in listed:
            if name == except_for:
                continue
            try:
                return self._verified(load_dir / name)
            except CheckpointError as error:
                self._warn(f"passed over a checkpoint: {error}")
        return None

    def _leads(self) -> bool:
        return self._rank == min(self._gather(None))

    def _verified(self, folder: Path) -> _Choice:
        """The checkpoint in `folder`, verified by all ranks together. Raises CheckpointError."""
        manifest = do_together(lambda: _inspected(folder), self._groups)
        digests = self._gather(None if manifest is None else manifest.digest)
        if manifest is None or None in digests.values():
            if len(set(digests.values())) > 1:
                without = [rank for rank, digest in digests.items() if digest is None]
                raise CheckpointError(f"{folder} has no manifest on the machine of ranks {without}")
            return _Choice(folder, None)
        # Ranks with the same manifest read the same files; without a shared file system each
        # machine has its own.
        readers = [rank for rank, digest in digests.items() if digest == manifest.digest]
        part = readers.index(self._rank)
        do_together(lambda: verify_files(folder, manifest, part, len(readers)), self._groups)
        return _Choice(folder, manifest)

    def _accept(self, choice: _Choice, request: _Request) -> bool:
        """Refuse another run's checkpoint. Returns whether per-rank states fit these ranks."""
        self._require_named_weights(choice, request)
        if choice.manifest is None:
            self._warn(
                f"{choice.folder} has no manifest of this package: it cannot be verified, and "
                "nobody knows whether its recipe, model and layout are those of this run"
            )
            return False
        objection = self._objection(choice, choice.manifest.facts, request)
        problem = common_problem(objection, self._groups)
        if problem is not None:
            raise CheckpointError(f"{choice.folder} cannot be loaded: {problem}")
        return other_layout(self._engine, choice.manifest.facts) is None

    def _objection(
        self, choice: _Choice, facts: Mapping[str, Any], request: _Request
    ) -> CheckpointError | None:
        if facts.get("framework") != FRAMEWORK:
            return CheckpointError(f"it was saved by {facts.get('framework')!r}, not {FRAMEWORK!r}")
        if request.is_strict:
            problem = other_model(self._engine, facts, weights_only=not request.is_resumption)
            if problem is not None:
                return problem
        if not request.is_resumption:
            return None
        problem = other_recipe(self._activation, facts)
        if problem is not None and self._activation.config.on_mismatch == "error":
            return CheckpointError(f"{problem}\n{_RECIPE_REMEDY}")
        note = problem or converted_states(self._activation, facts)
        if note is not None:
            self._warn(f"{choice.folder}: {note}")
        return other_layout(self._engine, facts)

    def _require_named_weights(self, choice: _Choice, request: _Request) -> None:
        """ZeRO-3 without optimizer states: DeepSpeed takes the weights of what `latest` names."""
        if self._engine.zero_optimization_stage() < 3 or request.is_resumption:
            return
        latest = read_latest(request.load_dir)
        if latest != choice.folder.name:
            raise CheckpointError(
                f"DeepSpeed's ZeRO-3 takes weights without optimizer states only from the tag that "
                f"'latest' names, which is {latest!r}, not {choice.folder.name!r}: load optimizer "
                f"states too, or write that tag into {request.load_dir / 'latest'}"
            )

    def _restore(self, choice: _Choice, request: _Request, has_same_layout: bool) -> None:
        """Our own state: error feedback, random generators. Their files have been verified."""
        if self._communication is not None and request.is_resumption:
            self._communication.memory.load(choice.folder)
        name = RNG_FILE.format(rank=self._rank)
        known = choice.manifest is not None and name in choice.manifest.files
        restores = known and has_same_layout and request.is_resumption

        def restore() -> None:
            if restores:
                restore_rng(choice.folder / name, device_of(self._engine))

        do_together(restore, self._groups, _HALF_LOADED)

    def _warn(self, message: str) -> None:
        if self._rank == 0:
            logger.warning("fp4: %s", message)


def _inspected(folder: Path) -> Manifest | None:
    """The manifest, with names and sizes checked; what can be checked without one."""
    manifest = Manifest.read(folder)
    if manifest is not None:
        verify_names(folder, manifest)
    elif folder.is_dir():
        inspect_files(folder)
    else:
        raise CheckpointError(f"there is no checkpoint {folder}")
    return manifest
