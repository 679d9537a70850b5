"""The sharding strategy over `torch.distributed.fsdp.FullyShardedDataParallel`, the first version of FSDP.

Parameters of a block are joined to one flat tensor that is divided. Of the CPU, torch supports a part of it only; what
is not supported there is refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, ClassVar, Final

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn import Module, Parameter

from accel_plugins.bundle import Bundle, canonical_name
from accel_plugins.fsdp import loading
from accel_plugins.fsdp.policies import blocks_to_shard, dtype_of, ignored_parameters
from accel_plugins.fsdp.sharded import ShardedStrategy
from accel_plugins.manifest import Axis
from accel_plugins.mesh_axes import part
from accel_plugins.wrapped.unwrap import is_compiled_module, wrapped_module
from accel_state.errors import Conflict, NotOffered

__all__ = ("FSDP1Strategy",)

_HYBRID: Final = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_WRONG_ON_CPU: Final = ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")


@wrapped_module.register(FullyShardedDataParallel)
def _inside_sharded(model: Any) -> Module | None:
    inner: Module = model.module
    return inner


class FSDP1Strategy(ShardedStrategy):
    """Shards the parameters of each block joined to one."""

    version: ClassVar[int] = 1

    def check(self, bundle: Bundle) -> None:
        super().check(bundle)
        name = self._strategy_name
        asked = f"FSDP version 1 was asked for with sharding_strategy={name!r}."
        if self._on_cpu and name in _WRONG_ON_CPU:
            raise NotOffered(
                asked,
                "On a CPU torch computes wrong losses with it.",
                "Use 'FULL_SHARD', or fsdp_version=2 with reshard_after_forward=False.",
            )
        if self._on_cpu and self.config.cpu_offload:
            raise NotOffered(
                f"{asked[:-1]} and cpu_offload=True.",
                "The parameters are on the CPU already, and torch refuses to move them there.",
                "Leave cpu_offload out, or use fsdp_version=2.",
            )
        self._check_states()
        if name == "NO_SHARD" and self.config.state_dict_type != "FULL_STATE_DICT":
            raise Conflict(
                f"{asked[:-1]} and state_dict_type={self.config.state_dict_type!r}.",
                "Nothing is sharded, so there are no shards to save.",
                "Use state_dict_type='FULL_STATE_DICT'.",
            )
        self._check_mesh(asked, name)
        self._check_groups(bundle)

    def _check_states(self) -> None:
        to_host = {"state_dict_config": self.whole_to_host, "optim_state_dict_config": self.optimizer_to_host}
        for field, asked_for in to_host.items():
            if self._on_cpu and asked_for:
                raise NotOffered(
                    f"{field} with offload_to_cpu=True was asked for.",
                    "On a CPU torch ends the process while it puts the state together.",
                    f"Leave {field} out.",
                )

    def _check_mesh(self, asked: str, name: str) -> None:
        copies = part(self.context.mesh, Axis.REPLICATE) is not None
        if self.context.mesh is not None and copies != (name in _HYBRID):
            raise Conflict(
                f"{asked[:-1]} and a ParallelismConfig {'with' if copies else 'without'} dp_replicate_size above 1.",
                "Copies of groups that divide the parameters are what the hybrid strategies are for.",
                "Use 'HYBRID_SHARD' with dp_replicate_size, and 'FULL_SHARD' without.",
            )

    def _check_groups(self, bundle: Bundle) -> None:
        if self.config.use_orig_params:
            return
        for optimizer in bundle.optimizers:
            if len(optimizer.param_groups) > 1 or len(bundle.models) > 1:
                raise Conflict(
                    "FSDP version 1 was asked for with use_orig_params=False.",
                    "It joins parameters, so they cannot have several groups of options or belong to several models.",
                    "Use use_orig_params=True.",
                )

    @property
    def _on_cpu(self) -> bool:
        return self.context.process.device.type == "cpu"

    @property
    def whole_to_host(self) -> bool:
        # torch 2.13 ends the process when it gathers to the first process only, on a CPU.
        return bool(getattr(self.config.state_dict_config, "offload_to_cpu", not self._on_cpu))

    @property
    def optimizer_to_host(self) -> bool:
        return bool(getattr(self.config.optim_state_dict_config, "offload_to_cpu", self.whole_to_host))

    @property
    def _strategy_name(self) -> str:
        """Name of the sharding strategy: asked for, else what the axes say."""
        config = self.config
        if config.sharding_strategy is not None:
            return str(config.sharding_strategy)
        copies = part(self.context.mesh, Axis.REPLICATE) is not None
        whole_after_forward = config.reshard_after_forward is False
        names = {
            (False, False): "FULL_SHARD",
            (False, True): "SHARD_GRAD_OP",
            (True, False): "HYBRID_SHARD",
            (True, True): "HYBRID_SHARD_ZERO2",
        }
        return names[copies, whole_after_forward]

    # ------------------------------------------------------------------ preparing

    def setup(self, bundle: Bundle) -> Bundle:
        if self.context.precision.scaler is not None:
            self._use_sharded_scaler()
        return super().setup(bundle)

    def follow(self, bundle: Bundle, before: Mapping[Parameter, str]) -> None:
        if self.config.use_orig_params:
            bundle.rebind_by_name(before)
            return
        for optimizer in bundle.optimizers:
            optimizer.param_groups[0]["params"] = list(bundle.models[0].parameters())

    def _use_sharded_scaler(self) -> None:
        """Find overflows of all processes: each sees its shards of the gradients only."""
        precision: Any = self.context.precision
        plain = precision.scaler
        if isinstance(plain, ShardedGradScaler):
            return
        scaler = ShardedGradScaler(
            device=self.context.process.device.type,
            init_scale=plain.get_scale(),
            growth_factor=plain.get_growth_factor(),
            backoff_factor=plain.get_backoff_factor(),
            growth_interval=plain.get_growth_interval(),
            enabled=plain.is_enabled(),
        )
        precision.replace_scaler(scaler)

    def shard(self, model: Module) -> Module:
        config = self.config
        if config.sync_module_states or config.cpu_ram_efficient_loading:
            loading.send_from_first(model)
        blocks = {id(block) for block in blocks_to_shard(model, config)}
        prefetch = config.backward_prefetch
        return FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy[self._strategy_name],
            cpu_offload=CPUOffload(offload_params=bool(config.cpu_offload)),
            auto_wrap_policy=CustomPolicy(lambda module: id(module) in blocks) if blocks else None,
            backward_prefetch=None if prefetch in (None, "NO_PREFETCH") else BackwardPrefetch[prefetch],
            mixed_precision=self._mixed_precision(),
            ignored_states=list(ignored_parameters(model, config)) or None,
            device_id=self.context.process.device,
            forward_prefetch=bool(config.forward_prefetch),
            limit_all_gathers=config.limit_all_gathers,
            use_orig_params=bool(config.use_orig_params),
            device_mesh=self._mesh(),
        )

    def part_held(self) -> Hashable:
        # Its parameters are plain tensors that do not know of each other.
        process, shards = self.context.process, part(self.context.mesh, Axis.SHARD)
        if self._strategy_name == "NO_SHARD":
            return None
        if shards is not None:
            return shards.get_local_rank()
        return process.topology.local_rank if self._strategy_name in _HYBRID else process.rank

    def _mesh(self) -> DeviceMesh:
        """The mesh of the run; without one, the hybrid strategies divide within a node and copy between nodes."""
        process = self.context.process
        if self.context.mesh is not None:
            return self.context.mesh
        names: tuple[str, ...] = (Axis.SHARD.value,)
        sizes: tuple[int, ...] = (process.world_size,)
        if self._strategy_name in _HYBRID:
            on_node = process.topology.local_world_size
            names, sizes = (Axis.REPLICATE.value, *names), (process.world_size // on_node, on_node)
        return init_device_mesh(process.device.type, sizes, mesh_dim_names=names)

    def _mixed_precision(self) -> MixedPrecision | None:
        policy, compute = self.config.mixed_precision_policy, self.context.precision.dtype
        if isinstance(policy, MixedPrecision):
            return policy
        if policy is None:
            # Gradients travel in fp32: the scale of the loss cannot make their sum overflow there.
            return None if compute is None else MixedPrecision(param_dtype=compute, reduce_dtype=dtype_of("float32"))
        given = {"param_dtype": policy} if isinstance(policy, str) else policy
        given = given if isinstance(given, dict) else vars(given)
        return MixedPrecision(
            param_dtype=dtype_of(given.get("param_dtype")),
            reduce_dtype=dtype_of(given.get("reduce_dtype")),
            buffer_dtype=dtype_of(given.get("buffer_dtype")),
        )

    def unwrap(self, model: Module) -> Module:
        sharded = _sharded(model)
        return model if sharded is None else sharded.module

    # ------------------------------------------------------------------ one step

    def no_sync(self, model: Module) -> AbstractContextManager[None]:
        sharded = _sharded(model)
        return super().no_sync(model) if sharded is None else _Syncing(self._holding, sharded, held=True)

    def sync_in_next_backward(self, model: Module) -> AbstractContextManager[None]:
        sharded = _sharded(model)
        if sharded is None:
            return super().sync_in_next_backward(model)
        return _Syncing(self._holding, sharded, held=False)

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        given = {id(parameter) for parameter in parameters}
        for model in self._models():
            if given == {id(parameter) for parameter in model.parameters()}:
                norm: Tensor = model.clip_grad_norm_(max_norm, norm_type)
                return norm
        raise NotOffered(
            "The gradients of some parameters were to be clipped to a norm.",
            "With FSDP version 1 the norm is that of one whole model.",
            "Give model.parameters(), or use fsdp_version=2.",
        )

    def _models(self) -> set[FullyShardedDataParallel]:
        """The models that train."""
        return {sharded for model in self._owners.values() if (sharded := _sharded(model)) is not None}

    def gradients(self, model: Module) -> dict[str, Tensor]:
        sharded = _sharded(model)
        if sharded is None:
            return super().gradients(model)
        with FullyShardedDataParallel.summon_full_params(sharded, with_grads=True):
            return {
                canonical_name(name): parameter.grad.clone()
                for name, parameter in sharded.module.named_parameters()
                if parameter.grad is not None
            }


def _sharded(model: Any) -> FullyShardedDataParallel | None:
    """The wrapper that `setup` put around a model, also inside a compiled one."""
    if is_compiled_module(model):
        model = model._orig_mod
    return model if isinstance(model, FullyShardedDataParallel) else None


class _Syncing:
    """Backward reduces gradients, or adds them up whole, for a while; may be nested."""

    __slots__ = ("_held", "_holding", "_model")

    def __init__(self, holding: dict[int, int], model: FullyShardedDataParallel, held: bool) -> None:
        self._holding, self._model, self._held = holding, model, held

    @property
    def _key(self) -> int:
        return id(self._model.module)

    def _set(self, depth: int, sync: bool) -> None:
        self._holding[self._key] = depth
        blocks: list[Any] = FullyShardedDataParallel.fsdp_modules(self._model)
        for block in blocks:
            block._sync_gradients = sync

    def __enter__(self) -> None:
        self._set(self._holding.get(self._key, 0) + self._held, not self._held)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        depth = self._holding.get(self._key, 0) - self._held
        self._set(depth, depth == 0)
