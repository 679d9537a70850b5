"""The sharding strategy with `torch.distributed.fsdp.FullyShardedDataParallel`, the first version of FSDP.

The parameters of a block are joined to one flat tensor, which is sharded. On CPUs torch supports only some options;
others raise errors.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, ClassVar, Final

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn import Module

from accel_plugins.bundle import Bundle
from accel_plugins.fsdp import weights
from accel_plugins.fsdp.sharded import ShardedStrategy
from accel_plugins.fsdp.sharding import ignored_parameters, shard_groups
from accel_plugins.layers import is_compiled_module
from accel_plugins.manifest import Axis
from accel_plugins.matrix_optimizers import refuse_matrix_optimizers
from accel_plugins.mesh import submesh
from accel_plugins.parameters import canonical_name, find_tied_parameters
from accel_state.errors import Conflict, NotOffered
from accel_state.settings.schema import given_value, member_name, plain_value

__all__ = ("FSDP1Strategy",)

_HYBRID_STRATEGIES: Final = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_MEMBER_OF_STRATEGY: Final = {"HYBRID_SHARD_ZERO2": "_HYBRID_SHARD_ZERO2"}
_STRATEGIES_WRONG_ON_CPU: Final = ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")


class FSDP1Strategy(ShardedStrategy):
    """Shards the parameters of each block as one flat tensor."""

    version: ClassVar[int] = 1

    def check(self, bundle: Bundle) -> None:
        super().check(bundle)
        refuse_matrix_optimizers(bundle.optimizers, "FSDP version 1")
        name = self._strategy_name
        failure = f"Cannot use FSDP version 1 with sharding_strategy={name!r}."
        if self._on_cpu and name in _STRATEGIES_WRONG_ON_CPU:
            raise NotOffered(
                failure,
                "On a CPU, torch computes wrong losses with this strategy.",
                "Use 'FULL_SHARD', or fsdp_version=2 with reshard_after_forward=False.",
            )
        if self._on_cpu and self.config.cpu_offload.offload_params:
            raise NotOffered(
                f"{failure[:-1]} and cpu_offload=True.",
                "The parameters are already on the CPU, and torch refuses to move them there.",
                "Remove cpu_offload, or use fsdp_version=2.",
            )
        if name == "NO_SHARD" and not self._full:
            raise Conflict(
                f"{failure[:-1]} and state_dict_type={plain_value(self.config, 'state_dict_type')!r}.",
                "With this strategy nothing is sharded, so there are no shards to save.",
                "Use state_dict_type='FULL_STATE_DICT'.",
            )
        self._check_mesh(failure, name)
        self._check_groups(bundle)

    def _check_mesh(self, failure: str, name: str) -> None:
        copies = submesh(self.context.mesh, Axis.REPLICATE) is not None
        if self.context.mesh is not None and copies != (name in _HYBRID_STRATEGIES):
            raise Conflict(
                f"{failure[:-1]} and a ParallelismConfig {'with' if copies else 'without'} dp_replicate_size above 1.",
                "Replicated groups that shard the parameters need a hybrid strategy.",
                "Use 'HYBRID_SHARD' with dp_replicate_size, and 'FULL_SHARD' without.",
            )

    def _check_groups(self, bundle: Bundle) -> None:
        if self.config.use_orig_params or not bundle.models:
            return
        for optimizer in bundle.optimizers:
            if len(optimizer.param_groups) > 1 or len(bundle.models) > 1:
                raise Conflict(
                    "Cannot use FSDP version 1 with use_orig_params=False.",
                    "It joins parameters, so an optimizer cannot have several groups of options or parameters of "
                    "several models.",
                    "Use use_orig_params=True.",
                )

    @property
    def _on_cpu(self) -> bool:
        return self.context.process.device.type == "cpu"

    @property
    def full_to_host(self) -> bool:
        # On a CPU, torch 2.13 crashes when it gathers to the first process only; all states are in host memory anyway.
        return not self._on_cpu and bool(getattr(self.config.state_dict_config, "offload_to_cpu", True))

    @property
    def optimizer_to_host(self) -> bool:
        return not self._on_cpu and bool(getattr(self.config.optim_state_dict_config, "offload_to_cpu", True))

    @property
    def _strategy_name(self) -> str:
        """The name of the sharding strategy: that of the settings, else the one that the axes imply."""
        config = self.config
        name = str(plain_value(config, "sharding_strategy"))
        chosen = given_value(config, "sharding_strategy") is not None or isinstance(
            member_name(config.reshard_after_forward), str
        )
        if chosen or submesh(self.context.mesh, Axis.REPLICATE) is None:
            return name
        return {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "HYBRID_SHARD_ZERO2"}[name]

    # ------------------------------------------------------------------ preparing

    def setup(self, bundle: Bundle) -> Bundle:
        names = bundle.parameter_names()
        # After parameters were joined, ties cannot be found any more.
        ties = [find_tied_parameters(model) for model in bundle.models]
        for number, model in enumerate(bundle.models):
            arrived = self.arrives_sharded(model)
            if not arrived and self.context.precision.dtype is not None:
                weights.train_in_fp32(model)
            ignored = self.names_of_ignored(model)
            bundle.models[number] = self._shard(model)
            if not arrived:
                self.average_ignored(bundle.models[number], ignored)
        if self.config.use_orig_params:
            bundle.rebind_by_name(names)
        else:
            for optimizer in bundle.optimizers if bundle.models else ():
                optimizer.param_groups[0]["params"] = list(bundle.models[0].parameters())
        self.record(bundle, ties)
        return bundle

    def _shard(self, model: Module) -> Module:
        if is_compiled_module(model):
            # Around the compiled module, torch's wrapper would name parameters `_orig_mod...` in all state dicts.
            compiled: Any = model
            sharded = self._shard(compiled._orig_mod)
            sharded._compiled_call_impl = compiled.dynamo_ctx(sharded._call_impl)
            return sharded
        _compile_parts_in_place(model)
        config = self.config
        if config.sync_module_states or config.cpu_ram_efficient_loading:
            weights.send_from_first(model, self.context.process.device)
        blocks = {id(block) for block in shard_groups(model, config.policy_for(model))}
        return FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy[_MEMBER_OF_STRATEGY.get(self._strategy_name, self._strategy_name)],
            cpu_offload=config.cpu_offload,
            auto_wrap_policy=CustomPolicy(lambda module: id(module) in blocks) if blocks else None,
            backward_prefetch=config.backward_prefetch,
            mixed_precision=config.mixed_precision_policy,
            ignored_states=list(ignored_parameters(model, config.ignored_modules)) or None,
            device_id=self.context.process.device,
            forward_prefetch=bool(config.forward_prefetch),
            limit_all_gathers=config.limit_all_gathers,
            use_orig_params=bool(config.use_orig_params),
            device_mesh=self._mesh(),
        )

    def shard_key(self, tensor: Tensor) -> Hashable:
        # Shards are plain tensors, as are the parameters of ignored and of added modules.
        process, shards = self.context.process, submesh(self.context.mesh, Axis.SHARD)
        if self._strategy_name == "NO_SHARD" or any(tensor in unsharded for unsharded in self.unreduced.values()):
            return None
        if shards is not None:
            return shards.get_local_rank()
        return process.topology.local_rank if self._strategy_name in _HYBRID_STRATEGIES else process.rank

    def _mesh(self) -> DeviceMesh:
        """The mesh of the run; without one, the hybrid strategies shard within a node and replicate between nodes."""
        process = self.context.process
        if self.context.mesh is not None:
            return self.context.mesh
        names: tuple[str, ...] = (Axis.SHARD.value,)
        sizes: tuple[int, ...] = (process.world_size,)
        if self._strategy_name in _HYBRID_STRATEGIES:
            on_node = process.topology.local_world_size
            names, sizes = (Axis.REPLICATE.value, *names), (process.world_size // on_node, on_node)
        return init_device_mesh(process.device.type, sizes, mesh_dim_names=names)

    def unwrap(self, model: Module) -> Module:
        sharded = _sharded(model)
        return model if sharded is None else sharded.module

    # ------------------------------------------------------------------ one step

    def reduces_gradients(self, model: Module) -> bool:
        sharded: Any = _sharded(model)
        return sharded is None or bool(sharded._sync_gradients)

    def reduce_gradients(self, model: Module, reduces: bool) -> None:
        blocks: list[Any] = FullyShardedDataParallel.fsdp_modules(model)
        for block in blocks:
            block._sync_gradients = reduces

    def reshard(self, model: Module) -> None:
        # Forward leaves the parameters of the root gathered, and torch has no public function that frees them.
        blocks: list[Any] = FullyShardedDataParallel.fsdp_modules(model)
        for block in blocks:
            if (handle := block._handle) is not None and handle.uses_sharded_strategy:
                handle.reshard(free_unsharded_flat_param=True)

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        clipped = {id(parameter) for parameter in parameters}
        for model in self._models():
            if clipped == {id(parameter) for parameter in model.parameters()}:
                norm: Tensor = model.clip_grad_norm_(max_norm, norm_type)
                return norm
        raise NotOffered(
            "Cannot clip the gradients of some parameters to a norm.",
            "FSDP version 1 computes the norm of all parameters of one model only.",
            "Pass model.parameters(), or use fsdp_version=2.",
        )

    def _models(self) -> set[FullyShardedDataParallel]:
        """The models that have an optimizer."""
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


def _compile_parts_in_place(model: Module) -> None:
    """Replace compiled submodules by what they compile, compiled in place.

    torch's policy wraps the module inside a compiled one, and the compiled call would go on to the module without its
    wrapper, which gathers the parameters.
    """
    for parent in list(model.modules()):
        for name, part in list(parent.named_children()):
            if is_compiled_module(part):
                compiled: Any = part
                inner = compiled._orig_mod
                inner._compiled_call_impl = compiled.dynamo_ctx(inner._call_impl)
                setattr(parent, name, inner)


def _sharded(model: Any) -> FullyShardedDataParallel | None:
    """The wrapper that `setup` added to a model, or None for any other module."""
    return model if isinstance(model, FullyShardedDataParallel) else None
