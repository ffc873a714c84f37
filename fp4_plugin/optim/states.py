"""The state of one parameter: its keys, how it starts, and its forms in a checkpoint.

In memory a moment is a tensor of codes of the parameter's shape and a vector of scales, one per
BLOCK_SIZE elements of the flattened parameter. In a checkpoint it is, by default, `portable`:
float32 under the names of torch.optim.AdamW, which AdamW itself loads and DeepSpeed's universal
format is made from. Writing and reading that changes no bit. `native` is half the size: the codes
themselves, under names that neither of the two takes for numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fp4_plugin.errors import ConfigError
from fp4_plugin.optim.pieces import SCALE, Fields, for_each_piece
from fp4_plugin.optim.scratch import Scratch
from fp4_plugin.optim.state_format import StateFormat, num_blocks
from fp4_plugin.optim.update import Formats

__all__ = [
    "EXP_AVG",
    "EXP_AVG_SQ",
    "MASTER",
    "SCALE",
    "STEP",
    "decode_tensor",
    "encode_tensor",
    "export_state",
    "format_of",
    "import_state",
    "is_packed",
    "new_state",
]

State = dict[str, Any]

# Always there, and part of every checkpoint.
STEP = "step"
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
# There for parameters of 16 bits, and part of every checkpoint.
MASTER = "master"
# Added to a name above. In native checkpoints only; SCALE is there, too, and in memory, but never
# in portable ones. 8-bit codes are bytes there: neither pickle nor gloo carries float8.
CODES = "_codes"


def new_state(param: torch.Tensor, formats: Formats) -> State:
    """Zero moments, and for a 16-bit parameter its master: a copy of it."""
    state: State = {STEP: torch.zeros((), dtype=torch.float32)}
    for name, fmt in _moments(formats):
        state[name] = torch.zeros(param.shape, dtype=fmt.dtype, device=param.device)
        state[name + SCALE] = torch.ones(num_blocks(param.numel()), device=param.device)
    if param.dtype != torch.float32:
        state |= _stored(MASTER, param.detach(), formats.master)
    return state


def is_packed(state: Mapping[str, Any]) -> bool:
    """False if a moment is a float32 tensor that somebody else has put there to be encoded."""
    return all(state[name].dtype != torch.float32 for name in (EXP_AVG, EXP_AVG_SQ))


def export_state(state: Mapping[str, Any], formats: Formats, native: bool) -> State:
    """`state` for a checkpoint, in host memory: exporting takes no memory of the device."""
    if not is_packed(state):  # from a universal checkpoint, and no step since
        return {name: value for name, value in state.items() if not name.endswith(SCALE)}
    exported: State = {STEP: state[STEP].clone()}
    for name, fmt in _kept(state, formats):
        codes = _host_copy(state[name]) if fmt is None or native else state[name].cpu()
        if fmt is None:
            exported[name] = codes
        elif native:
            exported[name + CODES] = codes.view(torch.uint8) if codes.dtype.itemsize == 1 else codes
            exported[name + SCALE] = _host_copy(state[name + SCALE])
        else:
            exported[name] = decode_tensor(codes, state[name + SCALE].cpu(), fmt)
    return exported


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A state that was exported does not change in the next step."""
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()


def import_state(param: torch.Tensor, saved: Mapping[str, Any], formats: Formats) -> State:
    """The state in memory of what `export_state`, AdamW or a universal checkpoint holds.

    Raises ConfigError if a moment is missing, has another number of elements than `param`, or
    belongs to amsgrad.
    """
    if "max_exp_avg_sq" in saved:
        raise ConfigError(
            "the optimiser state holds 'max_exp_avg_sq': it is that of AdamW with amsgrad, which "
            "FP16StateAdamW does not implement; continue with torch.optim.AdamW"
        )
    state: State = {STEP: torch.tensor(float(saved.get(STEP, 0.0)), dtype=torch.float32)}
    for name, fmt in _moments(formats):
        state |= _stored(name, _saved_values(name, saved, param), fmt)
    if param.dtype != torch.float32:
        has_master = MASTER in saved or MASTER + CODES in saved
        master = _saved_values(MASTER, saved, param) if has_master else param.detach()
        state |= _stored(MASTER, master, formats.master)
    return state


def format_of(name: str, codes: torch.Tensor) -> StateFormat:
    """How to read, or write to nearest, the codes of the state `name`."""
    return StateFormat(name, codes.dtype, is_root=name == EXP_AVG_SQ)


def encode_tensor(values: torch.Tensor, fmt: StateFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of any shape -> codes of that shape, rounded to nearest, and float32 block scales."""
    x = values.detach().to(torch.float32, copy=True).reshape(-1)
    codes = torch.empty(values.shape, dtype=fmt.dtype, device=x.device)
    scale = torch.ones(num_blocks(x.numel()), dtype=torch.float32, device=x.device)
    scratch = Scratch()

    def encode(piece: Fields) -> None:
        fmt.encode(piece["x"], piece["codes"], piece["codes_scale"], None, scratch)

    fields = {"x": x, "codes": fmt.storage(codes.view(-1)), "codes_scale": scale}
    for_each_piece([fields], scratch, encode, constant=("x",))
    return codes, scale


def decode_tensor(codes: torch.Tensor, scale: torch.Tensor, fmt: StateFormat) -> torch.Tensor:
    """The inverse of `encode_tensor`: float32 of the shape of `codes`."""
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    scratch = Scratch()

    def decode(piece: Fields) -> None:
        fmt.decode(piece["codes"], piece["codes_scale"], piece["values"], scratch)

    stored = fmt.storage(codes.reshape(-1))
    fields = {"values": values.view(-1), "codes": stored, "codes_scale": scale}
    for_each_piece([fields], scratch, decode, constant=("codes", "codes_scale"))
    return values


def _moments(formats: Formats) -> list[tuple[str, StateFormat]]:
    return [(EXP_AVG, formats.exp_avg), (EXP_AVG_SQ, formats.exp_avg_sq)]


def _kept(state: Mapping[str, Any], formats: Formats) -> list[tuple[str, StateFormat | None]]:
    return [*_moments(formats), *([(MASTER, formats.master)] if MASTER in state else [])]


def _stored(name: str, values: torch.Tensor, fmt: StateFormat | None) -> State:
    if fmt is None:
        copy = torch.empty(values.shape, dtype=torch.float32, device=values.device)
        return {name: copy.copy_(values)}  # in the order of the codes, whatever that of `values`
    codes, scale = encode_tensor(values, fmt)
    return {name: codes, name + SCALE: scale}


def _saved_values(name: str, saved: Mapping[str, Any], param: torch.Tensor) -> torch.Tensor:
    """What `saved` says of `name`, on the device and in the shape of `param`."""
    if name + CODES in saved:
        codes = saved[name + CODES]
        codes = codes.view(torch.float8_e4m3fn) if codes.dtype == torch.uint8 else codes
        fmt = format_of(name, codes)
        scale = saved.get(name + SCALE, codes.new_empty(0))
        if scale.numel() != num_blocks(codes.numel()):
            raise ConfigError(
                f"{name + SCALE!r} in the optimiser state has {scale.numel():,} scales, "
                f"{num_blocks(codes.numel()):,} are needed: the state is incomplete"
            )
        values = decode_tensor(codes, scale, fmt)
    elif name in saved:
        values = saved[name]
    else:
        raise ConfigError(
            f"the optimiser state has no {name!r} (it has {sorted(map(str, saved))}): it is not "
            "that of AdamW or FP16StateAdamW"
        )
    if values.numel() != param.numel():
        raise ConfigError(
            f"{name!r} in the optimiser state has {values.numel():,} elements, the parameter "
            f"{param.numel():,}: the checkpoint is of another model or parallel layout"
        )
    return values.to(param.device).view(param.shape)
