"""What DeepSpeed reads and writes of a parameter's optimizer state is float32, not codes.

`safe_get_full_optimizer_state` and its kin narrow the tensors in `optimizer.state`, of which they
know the names exp_avg and exp_avg_sq: they would return FP16 codes without their scales, and write
float32 over them. ZeRO-1 and -2 (and BF16_Optimizer) keep views of them at each parameter, ZeRO-3
looks them up; a universal checkpoint leaves float32 tensors, which the next step would encode.
Functions are replaced on one engine's objects only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fp4_plugin.errors import NotRunYet
from fp4_plugin.integrations.deepspeed.optimizer_section import SETTINGS
from fp4_plugin.optim import BLOCK_SIZE, STATE_FORMATS, FP16StateAdamW
from fp4_plugin.optim.states import (
    EXP_AVG,
    EXP_AVG_SQ,
    SCALE,
    STEP,
    decode_tensor,
    encode_tensor,
    format_of,
    import_state,
    is_packed,
)
from fp4_plugin.optim.update import Formats

__all__ = ["decode_accesses"]

_MOMENTS = (EXP_AVG, EXP_AVG_SQ)
# The wrappers that map parameters to slices of flat tensors: (parameters, flat tensors) per group.
_GROUPS = (
    ("bit16_groups", "single_partition_of_fp32_groups"),  # ZeRO-1 and -2
    ("bf16_groups", "fp32_groups_flat_partition"),  # BF16_Optimizer
)


def decode_accesses(engine: Any, optimizer: FP16StateAdamW) -> None:
    """Replace the functions of `engine.optimizer` that read or write states of `optimizer`."""
    wrapper = engine.optimizer
    slices = _Slices(optimizer)
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):
        _decode_zero3(wrapper, slices)
    for parameters, flats in _GROUPS:
        if hasattr(wrapper, parameters) and hasattr(wrapper, flats):
            _decode_fragments(wrapper, parameters, flats, slices)
    if hasattr(wrapper, "_load_universal_checkpoint"):
        _encode_after_universal_load(engine, wrapper, optimizer)


class _Slices:
    """Slices of the flat states, as float32; written ones are encoded again, to nearest.

    A block that is written keeps the entries that were not, up to one rounding.
    """

    def __init__(self, optimizer: FP16StateAdamW) -> None:
        self._optimizer = optimizer

    def read(self, flat: torch.Tensor, key: str, start: int, numel: int) -> torch.Tensor:
        """(numel,) float32. Raises NotRunYet before the first step, ValueError for another key."""
        state = self.state(flat, key)
        if not is_packed(state):
            narrowed: torch.Tensor = state[key].narrow(0, start, numel)
            return narrowed
        values, first = self._blocks(state, key, start, numel)
        return values[start - first : start - first + numel]

    def write(self, flat: torch.Tensor, key: str, start: int, values: torch.Tensor) -> None:
        """Store `values`, flat, from `start` on."""
        state = self.state(flat, key)
        values = values.detach().reshape(-1)
        if not is_packed(state):
            state[key].narrow(0, start, values.numel()).copy_(values)
            return
        blocks, first = self._blocks(state, key, start, values.numel())
        blocks[start - first : start - first + values.numel()] = values
        codes, scale = encode_tensor(blocks, format_of(key, state[key]))
        state[key].narrow(0, first, codes.numel()).copy_(codes)
        state[key + SCALE].narrow(0, first // BLOCK_SIZE, scale.numel()).copy_(scale)

    def state(self, flat: torch.Tensor, key: str) -> dict[str, Any]:
        """The state of `flat`, which has `key`. Raises as `read`."""
        if key not in _MOMENTS:
            raise ValueError(f"{key!r} is no optimizer state; there are {list(_MOMENTS)}")
        state: dict[str, Any] = self._optimizer.state.get(flat, {})
        if key not in state:
            raise NotRunYet(f"there is no {key!r} before the first optimizer step")
        return state

    def _blocks(
        self, state: dict[str, Any], key: str, start: int, numel: int
    ) -> tuple[torch.Tensor, int]:
        """Float32 values of the blocks that hold [start, start + numel), and where they begin."""
        first, end = start // BLOCK_SIZE, -(-(start + numel) // BLOCK_SIZE)
        codes = state[key][first * BLOCK_SIZE : end * BLOCK_SIZE]
        values = decode_tensor(codes, state[key + SCALE][first:end], format_of(key, state[key]))
        return values, first * BLOCK_SIZE


def _decode_fragments(wrapper: Any, parameters: str, flats: str, slices: _Slices) -> None:
    """ZeRO-1, -2, BF16_Optimizer: parameters are linked again after loading and offloading."""
    link = wrapper._link_all_hp_params

    def install() -> None:
        pairs = zip(getattr(wrapper, parameters), getattr(wrapper, flats), strict=True)
        for group, flat in pairs:
            for parameter in group:
                _check_first(parameter, flat, slices)
                if parameter._hp_mapping is not None:
                    _decode_fragment(parameter, flat, slices)

    def link_all(*args: Any, **kwargs: Any) -> None:
        link(*args, **kwargs)
        install()

    wrapper._link_all_hp_params = link_all
    install()


def _check_first(parameter: Any, flat: torch.Tensor, slices: _Slices) -> None:
    """All ranks complain of a wrong request, so that those without a slice do not wait for one."""
    gather = parameter.get_full_hp_param

    def get_full_hp_param(optim_state_key: str | None = None) -> torch.Tensor:
        if optim_state_key is not None:
            slices.state(flat, optim_state_key)
        gathered: torch.Tensor = gather(optim_state_key)
        return gathered

    parameter.get_full_hp_param = get_full_hp_param


def _decode_fragment(parameter: Any, flat: torch.Tensor, slices: _Slices) -> None:
    mapping, plain_set = parameter._hp_mapping, parameter.set_full_hp_param

    def get_optim_state_fragment(key: str) -> torch.Tensor:
        loading = (mapping.optim_fragment or {}).get(key)  # by a universal checkpoint
        if loading is not None:
            fragment: torch.Tensor = loading
            return fragment
        address = mapping.get_hp_fragment_address()
        return slices.read(flat, key, address.start, address.numel)

    def set_optim_state_fragment(*args: Any, **kwargs: Any) -> None:
        mapping.optim_fragment = {}  # DeepSpeed would keep views of codes

    def set_full_hp_param(value: torch.Tensor, optim_state_key: str | None = None) -> None:
        if optim_state_key is None:
            plain_set(value)
            return
        own = mapping.lp_fragment_address
        part = value.flatten().narrow(0, own.start, own.numel)
        slices.write(flat, optim_state_key, mapping.get_hp_fragment_address().start, part)

    mapping.get_optim_state_fragment = get_optim_state_fragment
    mapping.set_optim_state_fragment = set_optim_state_fragment
    parameter.set_full_hp_param = set_full_hp_param


def _decode_zero3(wrapper: Any, slices: _Slices) -> None:
    lookup = wrapper._get_fp32_opt_state_partition
    lent: list[tuple[torch.Tensor, str, int, torch.Tensor]] | None = None

    def partition(
        parameter: Any, *args: Any, optim_state_key: str | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, int]:
        part, group = lookup(parameter, *args, **kwargs)  # of the master weight
        if optim_state_key is None:
            return part, group
        _, start, numel = wrapper.grad_position[wrapper.get_param_id(parameter)]
        flat = wrapper.fp32_partitioned_groups_flat[group]
        values = slices.read(flat, optim_state_key, start, numel)
        if lent is not None:
            lent.append((flat, optim_state_key, start, values))
        return values, group

    def writing(setter: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(setter)
        def wrapped(*args: Any, **kwargs: Any) -> None:
            nonlocal lent
            lent = []
            try:
                setter(*args, **kwargs)  # copies into what it is lent
                for loan in lent:
                    slices.write(*loan)
            finally:
                lent = None

        return wrapped

    wrapper._get_fp32_opt_state_partition = partition
    wrapper.set_full_hp_param = writing(wrapper.set_full_hp_param)
    wrapper.set_local_hp_param = writing(wrapper.set_local_hp_param)


def _encode_after_universal_load(engine: Any, wrapper: Any, optimizer: FP16StateAdamW) -> None:
    """It writes float32 moments, and the settings of the run that saved, over ours."""
    load = wrapper._load_universal_checkpoint
    settings = {key: optimizer.param_groups[0][key] for key in SETTINGS}

    def load_universal(*args: Any, **kwargs: Any) -> None:
        load(*args, **kwargs)
        for group in optimizer.param_groups:
            group.update(settings)
        formats = Formats(
            exp_avg=STATE_FORMATS[settings["exp_avg"]],
            exp_avg_sq=STATE_FORMATS[settings["exp_avg_sq"]],
        )
        for flat, state in _unpacked(optimizer):
            # Where the optimizer counted per group it is missing, and the next step were too large.
            if state.get(STEP) is None:
                state[STEP] = float(engine.global_steps - engine.skipped_steps)
            optimizer.state[flat] = import_state(flat, state, formats)
        for parameter in engine.module.parameters():
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is not None:
                mapping.optim_fragment = {}  # views of the float32 tensors

    wrapper._load_universal_checkpoint = load_universal


def _unpacked(optimizer: FP16StateAdamW) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    for flat, state in list(optimizer.state.items()):
        if all(name in state for name in _MOMENTS) and not is_packed(state):
            yield flat, state
