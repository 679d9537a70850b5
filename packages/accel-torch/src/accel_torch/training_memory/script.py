"""The memory of a training script: the script runs until it prepares its model, and a fork of it tries each plan.

Parameters never have values, so that a model needs no memory. Data have values: the script reads its batches as usual.
Each fork continues the script until the end of its second optimizer step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakTensorKeyDictionary

from accel_plugins.bundle import Bundle
from accel_plugins.parameters import rebind
from accel_plugins.single.strategy import SingleStrategy
from accel_plugins.wrapped.optimizer import inner_optimizer
from accel_state.errors import AccelError, SettingError
from accel_torch.hooks import PROCESS_HOOKS, Hook
from accel_torch.observed_runs import StopRun, run_script
from accel_torch.training_memory import estimating
from accel_torch.training_memory.comparison import ModelFacts, PlanComparison, model_facts
from accel_torch.training_memory.plans import TrainingPlan
from accel_torch.training_memory.trial import RankMemory, Trial, naming_values

if TYPE_CHECKING:
    from accel_plugins.context import Context
    from accel_torch.options import Options
    from accel_torch.session import Session

__all__ = ("compare_plans_of_script",)

_Compare = Callable[[ModelFacts, Callable[[TrainingPlan], RankMemory]], PlanComparison]
_END: Final = object()


def compare_plans_of_script(
    script: str, arguments: Sequence[str], compare: _Compare, mixed_precision: str = "no", rank: int = 0
) -> PlanComparison:
    """Run a script until it prepares its model, and compare the plans there.

    Args:
        script: the path of the script.
        arguments: the script's arguments.
        compare: called with the facts about the model, and the function that runs a trial of a plan.
        mixed_precision: "no", "bf16" or "fp16".
        rank: the rank whose memory the trials measure.

    Raises:
        SettingError: the script does not exist, prepares no model, fails, or ends before its second optimizer step.
    """
    failure = f"Cannot estimate the memory of training {script!r}."
    if not Path(script).is_file():
        raise SettingError(failure, "There is no such file.", "Give the path of a training script.")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    hook = _CompareAtPrepare(failure, compare, mixed_precision, mode, rank)
    arguments_before, path_before = sys.argv, list(sys.path)
    try:
        # The output of the script is not part of the report.
        with estimating(), naming_values(), contextlib.redirect_stdout(sys.stderr), _parameters_without_values(mode):
            run_script(script, arguments, hook)
    except BaseException as error:
        if hook.fork is not None:
            hook.fork.send(error)
        raise
    finally:
        PROCESS_HOOKS.remove(hook)
        sys.argv, sys.path[:] = arguments_before, path_before
    if hook.fork is not None:
        hook.fork.send(
            SettingError(
                failure,
                "The script ends before the second step of a prepared optimizer.",
                "Let it train for two steps: the first one creates the optimizer states.",
            )
        )
    if hook.found is None:
        raise SettingError(
            failure, "The script never calls accelerator.prepare() with a model.", "Prepare the model that you train."
        )
    return hook.found


class _CompareAtPrepare(Hook):
    """Compares the plans when the script prepares its first model; `fork` runs the trial of one plan in a fork."""

    def __init__(self, failure: str, compare: _Compare, mixed_precision: str, mode: FakeTensorMode, rank: int) -> None:
        self._failure, self._compare, self._mode, self._rank = failure, compare, mode, rank
        # bf16 has the same size as fp16, which would need the values of a scaler.
        self._precision = "no" if mixed_precision == "no" else "bf16"
        self.found: PlanComparison | None = None
        self.fork: _Fork | None = None

    def configure(self, options: Options) -> Options:
        """Remove the script's own plan."""
        os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)
        return options._replace(
            cpu=True,
            mixed_precision=self._precision,
            backend="single",
            backend_config=None,
            backends={},
            plugins={},
            transforms=(),
            parallelism_config=None,
            log_with=(),
        )

    def start(self, session: Session) -> None:
        """Do not check the first steps, which compares values."""
        session.guards_first_steps = False

    def before_prepare(self, session: Session, bundle: Bundle) -> None:
        """Compare the plans before the script prepares its first model."""
        if self.fork is not None or not bundle.models:
            return
        try:
            facts: Any = self._in_fork(session, None)
            self.found = self._compare(facts, lambda plan: self._in_fork(session, plan))
        except _Forked as forked:
            self.fork = forked.fork
            self.fork.begin()
        else:
            raise StopRun

    def _in_fork(self, session: Session, plan: TrainingPlan | None) -> Any:
        """The result of a fork; raises `_Forked` in the fork itself."""
        read, write = os.pipe()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # The fork does not use threads of this process.
            warnings.simplefilter("ignore", DeprecationWarning)
            number = os.fork()
        if number == 0:
            os.close(read)
            raise _Forked(_Fork(write, session, plan, Trial(plan or TrainingPlan(), self._rank, self._mode)))
        os.close(write)
        with open(read, "rb") as pipe:
            sent = pipe.read()
        os.waitpid(number, 0)
        found = pickle.loads(sent) if sent else SettingError(self._failure, "The system killed a trial.", "Try again.")
        if isinstance(found, AccelError):
            raise found
        if isinstance(found, str):
            raise SettingError(self._failure, f"The script fails: {found}.", "Run it alone first.")
        return found


class _TrialStrategy(SingleStrategy):
    """The strategy of a fork, which trains without values.

    Args:
        context: the context of the script's strategy.
        fork: the fork.
    """

    def __init__(self, context: Context, fork: _Fork) -> None:
        super().__init__(context)
        self._fork = fork

    def setup(self, bundle: Bundle) -> Bundle:
        return self._fork.setup(bundle)

    def no_sync(self, model: Any) -> contextlib.AbstractContextManager[None]:
        return self._fork.no_sync()

    def wrap_loader(self, loader: Any) -> Any:
        return _BatchesWithoutValues(loader, self._fork.batch_without_values)


class _Forked(BaseException):
    """Returns control from a fork to the script."""

    def __init__(self, fork: _Fork) -> None:
        super().__init__()
        self.fork = fork


class _Fork:
    """A fork that continues the script in a trial, sends the result, and exits.

    Args:
        write: the write end of a pipe.
        session: the session of the script's Accelerator.
        plan: the plan; None for the facts about the model.
        trial: the trial of the plan.
    """

    def __init__(self, write: int, session: Session, plan: TrainingPlan | None, trial: Trial) -> None:
        self._write, self._session, self._plan, self._trial = write, session, plan, trial
        # Weak references, since full parameters are freed when they are sharded.
        self._replaced: Any = WeakTensorKeyDictionary()
        self._contexts = contextlib.ExitStack()
        self._numbers = _NumbersOfLogs()
        self._operations = FlopCounterMode(display=False)
        self._model: Any = None
        self._batch: Any = None

    def begin(self) -> None:
        """Replace the strategy."""
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        torch.set_num_threads(1)
        self._contexts.enter_context(self._trial)
        self._contexts.enter_context(self._numbers)
        if self._plan is None:
            self._contexts.enter_context(self._operations)
        else:
            gradient = self._session.gradient
            gradient.plugin = dataclasses.replace(gradient.plugin, num_steps=min(self._plan.accumulation, 2))
        self._session.strategy = _TrialStrategy(self._session.strategy.context, self)

    def send(self, found: Any) -> NoReturn:
        """Send the result, and exit."""
        if isinstance(found, BaseException) and not isinstance(found, AccelError):
            found = f"{type(found).__name__}: {found}".partition("\n")[0]
        with open(self._write, "wb") as pipe:
            pipe.write(pickle.dumps(found))
        os._exit(0)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A block in which the trial does not synchronise gradients."""
        return self._trial.no_sync()

    def setup(self, bundle: Bundle) -> Bundle:
        """Prepare models and optimizers for the trial."""
        before = bundle.parameter_names()
        bundle.models[:] = [self._trial.prepare_model(model) for model in bundle.models]
        now = {name: parameter for parameter, name in bundle.parameter_names().items()}
        self._replaced.update({old: now[name] for old, name in before.items()})
        for model in bundle.models:
            self._numbers.refuse_in(model)
            self._model = self._model or model
        rebind(bundle.optimizers, dict(self._replaced))
        for optimizer in bundle.optimizers:
            inner: torch.optim.Optimizer = inner_optimizer(optimizer)
            self._trial.prepare_optimizer(inner)
            inner.register_step_pre_hook(self._before_step)
            inner.register_step_post_hook(self._after_step)
        return bundle

    def _before_step(self, *_: Any) -> None:
        if self._plan is None:
            self.send(model_facts(self._model, self._batch, float(self._operations.get_total_flops())))

    def _after_step(self, *_: Any) -> None:
        if self._trial.is_complete:
            self.send(self._trial.memory())

    def batch_without_values(self, batch: Any) -> Any:
        """The batch of the trial that replaces one of the script."""
        self._batch = self._trial.prepare_batch(batch)
        return self._batch


class _BatchesWithoutValues:
    """The batches of a loader that reads data with values."""

    def __init__(self, loader: Any, changed: Callable[[Any], Any]) -> None:
        self._loader, self._changed = loader, changed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        with unset_fake_temporarily():
            batches = iter(self._loader)
        while True:
            with unset_fake_temporarily():
                batch = next(batches, _END)
            if batch is _END:
                return
            yield self._changed(batch)


class _NumbersOfLogs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns 1 for `loss.item()` and similar reads outside of models, since scripts log numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._depth = 0

    def refuse_in(self, model: Module) -> None:
        """Do not change reads inside a model's forward."""
        model.register_forward_pre_hook(self._entered, prepend=True)
        model.register_forward_hook(self._left, always_call=True)

    def _entered(self, *_: Any) -> None:
        self._depth += 1

    def _left(self, *_: Any) -> None:
        self._depth -= 1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if function is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            dtype = args[0].dtype
            if not self._depth:
                return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def _parameters_without_values(mode: FakeTensorMode) -> Iterator[None]:
    """Context manager in which parameters become fake tensors as soon as a module has them."""
    register, convert = Module.register_parameter, Module._apply

    def register_without_values(module: Module, name: str, parameter: Parameter | None) -> None:
        if parameter is not None and not isinstance(parameter, FakeTensor) and parameter.device.type != "meta":
            parameter = Parameter(mode.from_tensor(parameter.detach()), parameter.requires_grad)
        register(module, name, parameter)

    Module.register_parameter = register_without_values  # type: ignore[method-assign, assignment]
    Module._apply = _convert_without_values  # type: ignore[method-assign]
    try:
        yield
    finally:
        Module.register_parameter = register  # type: ignore[method-assign]
        Module._apply = convert  # type: ignore[method-assign]


def _convert_without_values(module: Module, function: Callable[..., Any], recurse: bool = True) -> Module:
    """Like `Module._apply`, which swaps tensors; fake tensors cannot be swapped."""
    made: dict[torch.Tensor, Any] = {}
    for one in module.modules() if recurse else [module]:
        for held in (one._parameters, one._buffers):
            for name, tensor in held.items():
                if tensor is None or tensor.device.type == "meta":
                    continue
                if tensor not in made:
                    made[tensor] = _converted(tensor, function)
                held[name] = made[tensor]
    return module


def _converted(tensor: torch.Tensor, function: Callable[..., Any]) -> Any:
    if not isinstance(tensor, Parameter):
        return function(tensor)
    # Optimizers may refer to the parameter, so it is kept; it has no values to move.
    converted = function(tensor.detach())
    return tensor if converted.dtype == tensor.dtype else Parameter(converted, tensor.requires_grad)
