"""megatron-core on CPUs: what it takes to train its GPTModel without CUDA, and a small job."""

from __future__ import annotations

import contextlib
import queue
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["Job", "lay_out", "on_cpu"]

SEQUENCE, BATCH, VOCABULARY = 16, 2, 128


class _CudaMeansCpu(TorchFunctionMode):
    """Megatron writes device="cuda" and asks tensors whether they are torch.cuda.FloatTensor."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


@contextlib.contextmanager
def on_cpu():
    """Inside, Megatron's models, optimizers, checkpoints work on the CPU; dropout has to be 0."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    # Megatron spawns a process that imports everything anew, ten seconds for a queue; one who saves
    # before going on both fills and empties it.
    filesystem_async._results_queue = queue.Queue()
    vars(moe_utils).setdefault("te_general_gemm", None)  # 0.16.1 asks for it, there or not
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *args: None
    random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    _allow_sequence_parallel_norms()
    with _CudaMeansCpu():
        yield


def lay_out(tensor_parallel: int, pipeline_parallel: int = 1) -> None:
    """(Re)make Megatron's process groups; what is left of the ranks is data-parallel."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_parallel, pipeline_parallel)


def _allow_sequence_parallel_norms() -> None:
    """Megatron has none of torch's, which need only be marked: their gradients are partial."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    plain = WrappedTorchNorm.__new__

    def make(cls, config, *args, **kwargs):
        norm = plain(cls, replace(config, sequence_parallel=False), *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = make


def _gpt(config: Any, spec: Any) -> torch.nn.Module:
    """The part of the model that this pipeline stage has."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    return GPTModel(
        config,
        spec or get_gpt_layer_local_spec(config.num_moe_experts, moe_grouped_gemm=False),
        VOCABULARY,
        SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def _forward_step(batches: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """What a training script of Megatron gives to its schedule, for one microbatch."""
    tokens = next(batches)
    positions = torch.arange(SEQUENCE).expand(len(tokens), -1)
    mask = torch.ones(SEQUENCE, SEQUENCE).tril()[None, None] < 0.5
    output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
    return output, _mean


def _mean(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach()}


class Job:
    """A small GPT with Megatron's data parallelism, schedule, optimizer; and the section's parts.

    section: None trains as Megatron does by itself. shared_batch: all ranks get the same one.
    transformer: more of TransformerConfig.
    """

    def __init__(
        self,
        section: dict[str, Any] | None,
        tensor_parallel: int = 1,
        distributed_optimizer: bool = False,
        overlap: bool = False,
        bf16: bool = False,
        bucket_size: int | None = None,
        average: bool = False,
        shared_batch: bool = False,
        seed: int = 1,
        layer_spec: Any = None,
        **transformer: Any,
    ) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module
        from megatron.core.transformer.transformer_config import TransformerConfig

        from fp4_plugin.config import parse_section
        from fp4_plugin.integrations.megatron.job import MegatronJob
        from fp4_plugin.integrations.megatron.model import convert_megatron_model

        torch.manual_seed(seed)
        dtype = torch.bfloat16 if bf16 else torch.float32
        sizes = {"num_layers": 1, "hidden_size": 128, "num_attention_heads": 4}
        config = TransformerConfig(
            **{**sizes, **transformer},
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cpu_initialization=True,
            tensor_model_parallel_size=tensor_parallel,
            pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
            bf16=bf16,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            gradient_accumulation_fusion=False,
        )
        model = _gpt(config, layer_spec)
        self.fp4 = None
        if section is not None:
            self.fp4 = MegatronJob(parse_section(section))
            self.activation = convert_megatron_model(model, section)
        if bf16:
            model = Float16Module(config, model)
        self.ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=distributed_optimizer,
                overlap_grad_reduce=overlap,
                bucket_size=bucket_size,
                average_in_collective=average,
            ),
            model,
        )
        config.finalize_model_grads_func = finalize_model_grads
        if overlap:  # gradients are complete with the last microbatch only
            config.no_sync_func = self.ddp.no_sync
        if self.fp4 is not None:
            self.fp4.built([self.ddp], tensor_parallel)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=2e-3,
                bf16=bf16,
                params_dtype=dtype,
                use_distributed_optimizer=distributed_optimizer,
            ),
            [self.ddp],
        )
        if self.fp4 is not None:
            self.fp4.stepper(self.optimizer)
        self._ranks = parallel_state.get_data_parallel_world_size()
        self._part = slice(None)
        if not shared_batch:
            size = 4 * BATCH // self._ranks
            first = parallel_state.get_data_parallel_rank() * size
            self._part = slice(first, first + size)

    def step(self, number: int) -> float:
        """One step on batch `number`; the mean loss over all data-parallel ranks."""
        from megatron.core import parallel_state

        loss = torch.tensor([self.backward(number)])
        self.optimizer.step()
        if self.fp4 is not None:
            self.fp4.stepped(None)
        torch.distributed.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        group = parallel_state.get_pipeline_model_parallel_group()
        torch.distributed.broadcast(loss, last, group=group)
        return float(loss) / self._ranks

    def backward(self, number: int) -> float:
        """Gradients of batch `number`, reduced; the loss of this rank, 0 before the last stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        tokens = self._tokens(number)
        results = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iter(tokens.chunk(2)),
            model=[self.ddp],
            num_microbatches=2,
            seq_length=SEQUENCE,
            micro_batch_size=len(tokens) // 2,
            forward_only=False,
        )
        return sum(float(one["loss"]) for one in results) / 2

    def steps(self, numbers) -> list[float]:
        return [self.step(number) for number in numbers]

    def _tokens(self, number: int) -> torch.Tensor:
        """(batch, sequence + 1), this rank's part of batch `number`: runs of numbers."""
        generator = torch.Generator().manual_seed(number)
        start = torch.randint(VOCABULARY, (4 * BATCH, 1), generator=generator)
        stride = torch.randint(1, 4, (4 * BATCH, 1), generator=generator)
        tokens = (start + stride * torch.arange(SEQUENCE + 1)) % VOCABULARY
        return tokens[self._part]

    def _state(self, sharding: str, is_loading: bool) -> dict[str, Any]:
        """What Megatron-LM puts into a distributed checkpoint."""
        model = self.ddp.module
        model = getattr(model, "module", model)
        sharded = model.sharded_state_dict()
        metadata = {"distrib_optim_sharding_type": sharding}
        return {
            "model": sharded,
            "optimizer": self.optimizer.sharded_state_dict(
                sharded, is_loading=is_loading, metadata=metadata
            ),
        }

    def save(self, folder: str, sharding: str = "dp_reshardable") -> None:
        from megatron.core import dist_checkpointing

        dist_checkpointing.save(self._state(sharding, False), folder)

    def load(self, folder: str, sharding: str = "dp_reshardable") -> None:
        from megatron.core import dist_checkpointing

        loaded = dist_checkpointing.load(self._state(sharding, True), folder)
        model = self.ddp.module
        getattr(model, "module", model).load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
