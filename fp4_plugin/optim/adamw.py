"""AdamW with moments of 16 or 8 bits, for plain torch, DeepSpeed and Megatron."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch.optim import Optimizer

from fp4_plugin.errors import ConfigError
from fp4_plugin.optim.arithmetic import Hyperparameters
from fp4_plugin.optim.state_format import STATE_FORMATS
from fp4_plugin.optim.states import SCALE, STEP, export_state, import_state, is_packed, new_state
from fp4_plugin.optim.stepper import Stepper, Work
from fp4_plugin.optim.update import Formats

__all__ = ["FP16StateAdamW", "group_formats"]

Group = dict[str, Any]

_CHOICES = {
    "exp_avg": ("fp16", "e4m3"),
    "exp_avg_sq": ("fp16_sqrt",),
    "master_weights": ("fp32", "fp16"),
    "checkpoint": ("portable", "native"),
}
_PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What whoever made the optimiser decides; all else in a group comes from the checkpoint, also what
# schedulers and users keep there.
_STORAGE = (*_CHOICES, "compile")
_OF_TORCH = ("foreach", "fused", "capturable", "differentiable")
# Switches of torch's Adam and AdamW that change what a step computes, as this class has them.
_ALGORITHM = {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}


class FP16StateAdamW(Optimizer):
    """AdamW that keeps its first moment in FP16 (or E4M3) and the root of its second in FP16.

    All arithmetic of a step is float32. A float32 parameter is its own master weight (DeepSpeed
    hands the optimiser its float32 partitions); a parameter of 16 bits gets one, in float32, or in
    FP16 with block scales. Per parameter the optimiser so owns 4 bytes of moments (3 with E4M3) and
    4 or 2 of master weights, and for each of these 4 bytes of scale per 1024 elements.

    A number that is not finite spoils its block of 1024: all of them share a scale. And whoever
    writes into a 16-bit parameter, as loading a model does, has to load the optimiser state that
    belongs to it as well, or make a new optimiser: the next step would start from the old master.

    params: tensors or groups of them; float32, bfloat16 or float16, dense gradients.
    lr, betas, eps, weight_decay: as in torch.optim.AdamW; weight decay is decoupled.
    exp_avg: "fp16", or "e4m3" (FP8-LM, arXiv 2310.18313), which flushes entries below 2^-17 of the
    largest in their block of 1024 to zero.
    exp_avg_sq: "fp16_sqrt". master_weights: "fp32" or "fp16", for parameters of 16 bits.
    checkpoint: "portable" makes state_dict() what torch.optim.AdamW loads, in float32; "native"
    stores the codes, at half the size or less.
    compile: fuse a step with torch.compile (on CPU it needs a C++ compiler).

    Raises ConfigError for a value that is not allowed and for parameters of another type.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[Group],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        exp_avg: str = "fp16",
        exp_avg_sq: str = "fp16_sqrt",
        master_weights: str = "fp32",
        *,
        checkpoint: str = "portable",
        compile: bool = False,
        amsgrad: bool = False,
    ) -> None:
        if amsgrad:
            raise ConfigError(
                "amsgrad=True: FP16StateAdamW has no third moment; use torch.optim.AdamW for it"
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "exp_avg": exp_avg,
            "exp_avg_sq": exp_avg_sq,
            "master_weights": master_weights,
            "checkpoint": checkpoint,
            "compile": compile,
        }
        self._stepper = Stepper()
        super().__init__(cast(Any, params), defaults)

    def add_param_group(self, param_group: Group) -> None:
        """As in torch. Raises ConfigError for a setting or a parameter that is not allowed."""
        _check_settings({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for param in group["params"]:
                _check_parameter(param, group["master_weights"])
        except ConfigError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step for every parameter that has a gradient; returns what `closure` returns.

        Raises ConfigError for a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_sparse_gradients()
        for group in self.param_groups:
            formats = group_formats(group)
            work = [
                self._work(param, param.grad, formats)
                for param in group["params"]
                if param.grad is not None
            ]
            hyperparameters = partial(
                Hyperparameters,
                lr=float(group["lr"]),
                betas=tuple(group["betas"]),
                eps=group["eps"],
                weight_decay=group["weight_decay"],
            )
            self._stepper.update(work, formats, hyperparameters, compiled=group["compile"])
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with the states decoded to float32, unless `checkpoint` is "native"."""
        result = super().state_dict()
        formats = {
            index: (group_formats(group), group["checkpoint"] == "native")
            for group in result["param_groups"]
            for index in group["params"]
        }
        result["state"] = {
            index: export_state(state, *formats[index]) if index in formats else state
            for index, state in result["state"].items()
        }
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state of this class or of torch.optim.AdamW; stored as configured here.

        The checkpoint decides the hyperparameters, not how states are stored. Raises ConfigError
        for a state that cannot be continued: amsgrad, coupled weight decay, another size.
        """
        saved_groups = [dict(group) for group in state_dict["param_groups"]]
        for own, saved in zip(self.param_groups, saved_groups, strict=False):
            _refuse_other_algorithms(saved)
            left_out = (*_STORAGE, *_OF_TORCH, *_ALGORITHM)
            decided = {key: value for key, value in saved.items() if key not in left_out}
            saved.clear()
            saved.update({**own, **decided})
        ours = self._imported(state_dict, saved_groups)
        super().load_state_dict({**state_dict, "state": ours, "param_groups": saved_groups})

    def _imported(
        self, state_dict: Mapping[str, Any], saved_groups: list[Group]
    ) -> dict[Any, _Hidden]:
        """The saved states as they will be in memory, by their index in the checkpoint.

        None where the groups do not correspond, which torch refuses afterwards.
        """
        if [len(own["params"]) for own in self.param_groups] != [
            len(saved["params"]) for saved in saved_groups
        ]:
            return {}
        params = {
            index: (param, group_formats(own))
            for own, saved in zip(self.param_groups, saved_groups, strict=True)
            for param, index in zip(own["params"], saved["params"], strict=True)
        }
        return {
            index: _Hidden(import_state(params[index][0], state, params[index][1]))
            for index, state in state_dict["state"].items()
            if index in params
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_stepper", Stepper())  # a copy comes without one
        for param, loaded in self.state.items():
            if isinstance(loaded, _Hidden):
                self.state[param] = loaded.state

    def state_nbytes(self) -> dict[str, int]:
        """Bytes that the states hold by now, by kind: moments, scales, master weights, step."""
        total: dict[str, int] = {}
        for state in self.state.values():
            for name, value in state.items():
                kind = "scales" if name.endswith(SCALE) else name
                total[kind] = total.get(kind, 0) + value.numel() * value.element_size()
        return total

    def _refuse_sparse_gradients(self) -> None:
        """Before any state has counted the step."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.grad.layout != torch.strided:
                    raise ConfigError(
                        "FP16StateAdamW got a sparse gradient: make the layer dense "
                        "(nn.Embedding(sparse=False)), or give it to torch.optim.SparseAdam"
                    )

    def _work(self, param: torch.Tensor, grad: torch.Tensor, formats: Formats) -> Work:
        state = self.state[param]
        if not state:
            state.update(new_state(param, formats))
        elif not is_packed(state):
            # DeepSpeed's universal checkpoints put float32 moments here.
            self.state[param] = state = import_state(param, state, formats)
        state[STEP] += 1
        return Work(param, grad, state, step=int(state[STEP]))


class _Hidden:
    """A state on its way past torch's `load_state_dict`, which would cast it."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state


def group_formats(group: Mapping[str, Any]) -> Formats:
    """How the states of a param group of FP16StateAdamW are stored."""
    master = group["master_weights"]
    return Formats(
        exp_avg=STATE_FORMATS[group["exp_avg"]],
        exp_avg_sq=STATE_FORMATS[group["exp_avg_sq"]],
        master=None if master == "fp32" else STATE_FORMATS[f"{master}_master"],
    )


def _check_settings(group: Group) -> None:
    for name, allowed in _CHOICES.items():
        if group[name] not in allowed:
            raise ConfigError(f"{name}={group[name]!r}: allowed are {list(allowed)}")
    for name in ("lr", "eps", "weight_decay"):
        if not 0.0 <= _number(group[name]) < math.inf:
            raise ConfigError(f"{name}={group[name]!r}: must be a finite number, not below 0")
    betas = group["betas"]
    is_pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    if not is_pair or not all(0.0 <= _number(beta) < 1.0 for beta in betas):
        raise ConfigError(f"betas={betas!r}: two numbers from 0 to below 1")
    if not isinstance(group["compile"], bool):
        raise ConfigError(f"compile={group['compile']!r}: allowed are True and False")


def _number(value: Any) -> float:
    """NaN, which no bound allows, for what is no number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _check_parameter(param: torch.Tensor, master_weights: str) -> None:
    if param.dtype not in _PARAMETER_DTYPES:
        allowed = ", ".join(str(dtype) for dtype in _PARAMETER_DTYPES)
        raise ConfigError(
            f"a parameter of shape {tuple(param.shape)} is {param.dtype}: FP16StateAdamW takes "
            f"{allowed}; convert it, or leave it to another optimiser"
        )
    if param.dtype == torch.float32 and master_weights != "fp32":
        raise ConfigError(
            f"master_weights={master_weights!r}, but a parameter of shape {tuple(param.shape)} is "
            "float32 and so its own master weight: use master_weights='fp32', or 16-bit parameters"
        )


def _refuse_other_algorithms(saved_group: Mapping[str, Any]) -> None:
    for name, ours in _ALGORITHM.items():
        value = saved_group.get(name, ours)
        is_idle = name == "decoupled_weight_decay" and not saved_group.get("weight_decay")
        if bool(value) != ours and not is_idle:
            raise ConfigError(
                f"the optimiser state was made with {name}={value!r}, which FP16StateAdamW does "
                "not implement; continue with the optimiser that wrote it"
            )
