"""A pipeline that somebody else wrote: an axis of its own, gradients in forward, checkpoints of one process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pipeline_models import BuiltInParts

from accel_plugins import Bundle
from accel_plugins.checkpoint.state import load_folder
from accel_plugins.prepared import PreparedObjects
from accel_plugins.single.manifest import MANIFEST as SINGLE
from accel_plugins.transforms.tensor_parallel import TensorParallel
from accel_state.mesh import ParallelismConfig
from accel_testing.accelerator import AcceleratorSuite, unwrapped_model
from accel_testing.backends import BackendSuite, Case
from accel_testing.backends.base import train
from accel_testing.backends.reference_loop import Plain, batches, near
from accel_testing.processes import Processes

HERE = Path(__file__).parent
SOURCE = HERE / "accel-backend-pipeline" / "src"
MODEL = "pipeline_models:Classifier"
PLAN = {"0": "colwise", "2": "rowwise"}


@pytest.fixture(scope="module")
def importable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The processes import the backend from its folder, and find it as if it was installed."""
    site = tmp_path_factory.mktemp("site")
    installed = site / "accel_backend_pipeline-0.1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: accel-backend-pipeline\nVersion: 0.1.0\n")
    entry = "[accel.backends]\npipeline = accel_backend_pipeline.manifest:MANIFEST\n"
    (installed / "entry_points.txt").write_text(entry)
    added = [str(SOURCE), str(HERE), str(site)]
    sys.path[:0] = added
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*added, before := os.environ.get("PYTHONPATH", "")]))
    yield
    os.environ["PYTHONPATH"] = before
    for folder in added:
        sys.path.remove(folder)


@pytest.mark.usefixtures("importable")
class PipelineSuite(BackendSuite):
    target = "accel_backend_pipeline.manifest:MANIFEST"
    model = MODEL

    @pytest.fixture(scope="class")
    @classmethod
    def group(cls, importable: None) -> Iterator[Processes]:
        with Processes(cls.processes) as group:
            yield group


class TestTwoStages(PipelineSuite):
    parallelism_config: ClassVar[ParallelismConfig | None] = ParallelismConfig(axes={"pp": 2})


@pytest.mark.slow
class TestTwoReplicasOfTwoStages(PipelineSuite):
    parallelism_config: ClassVar[ParallelismConfig | None] = ParallelismConfig(dp_replicate_size=2, axes={"pp": 2})
    processes = 4


@pytest.mark.slow
class TestTwoStagesOfDividedLayers(PipelineSuite):
    parallelism_config: ClassVar[ParallelismConfig | None] = ParallelismConfig(tp_size=2, axes={"pp": 2})
    processes = 4

    def case(self, **changes: Any) -> Case:
        return super().case(**{"transforms": (TensorParallel(PLAN),), **changes})


@pytest.mark.slow
class TestFourStagesOfTwoProcesses(TestTwoStages):
    def settings(self, case: Case) -> Any:
        from accel_backend_pipeline import PipelineConfig

        return PipelineConfig("interleaved")


@pytest.mark.slow
class TestTwoStagesThroughTheAccelerator(PipelineSuite, AcceleratorSuite):
    parallelism_config: ClassVar[ParallelismConfig | None] = ParallelismConfig(axes={"pp": 2})


def test_a_pipeline_trains_through_the_accelerator(importable: None, processes: Callable[[int], Processes]) -> None:
    case = case_of("1f1b", ParallelismConfig(axes={"pp": 2})).but(
        training="accel_testing.accelerator:AcceleratorTraining", accumulation=2, clip_norm=0.5
    )
    plain = Plain(case).run()
    for answer in processes(2).run(train, case):
        assert answer["losses"] == near(plain.losses)
        assert answer["norms"] == near(plain.norms)
        assert answer["weights"] == near(plain.weights())
    assert processes(2).run(unwrapped_model, case) == ["NotOffered"] * 2


def train_and_save(case: Case, folder: str) -> dict[str, Any]:
    training = case.open()
    losses, norms = training.train()
    training.save(Path(folder))
    return {"losses": losses, "norms": norms, "weights": training.weights()}


def resume_alone(case: Case, folder: str) -> dict[str, Any]:
    training = case.open(case.make(5))
    contents = PreparedObjects([training.model], [training.optimizer])
    load_folder(folder, contents, training.strategy, training.process, allow_missing={"random_states"})
    loaded = training.weights()
    training.train(list(batches(case))[:2])
    return {"loaded": loaded, "after": training.weights()}


def case_of(schedule: str, axes: ParallelismConfig) -> Case:
    from accel_backend_pipeline import PipelineConfig
    from accel_backend_pipeline.manifest import MANIFEST

    transforms = (TensorParallel(PLAN),) if axes.tp_enabled else ()
    config = PipelineConfig(schedule)
    return Case(MANIFEST, config, model=MODEL, parallelism_config=axes, transforms=transforms, adam=True, clip_norm=0.3)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize(
    "axes",
    [
        ParallelismConfig(axes={"pp": 2}),
        ParallelismConfig(dp_replicate_size=2, axes={"pp": 2}),
        ParallelismConfig(tp_size=2, axes={"pp": 2}),
    ],
    ids=["stages", "replicas of stages", "stages of divided layers"],
)
def test_a_pipeline_trains_as_one_process_which_loads_its_checkpoint(
    importable: None, processes: Callable[[int], Processes], tmp_path: Path, schedule: str, axes: ParallelismConfig
) -> None:
    case = case_of(schedule, axes)
    plain = Plain(case).run()
    for answer in processes(axes.total_size).run(train_and_save, case, str(tmp_path)):
        assert answer["losses"] == near(plain.losses)
        assert answer["norms"] == near(plain.norms)
        assert answer["weights"] == near(plain.weights())

    (alone,) = processes(1).run(resume_alone, Case(SINGLE, model=MODEL, adam=True, clip_norm=0.3), str(tmp_path))
    assert alone["loaded"] == answer["weights"]
    plain.run(list(batches(case))[:2])
    assert alone["after"] == near(plain.weights())


def train_in_parts(case: Case, folder: str) -> dict[str, Any]:
    """Build, train and save a model whose layers of other processes have no memory; go on, and load it again."""
    training = case.open()
    torch.manual_seed(3 + training.process.rank)
    with training.strategy.init_module() as part:
        model = BuiltInParts(part)
    in_memory = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    bundle = training.prepare(Bundle.of([model, torch.optim.Adam(model.parameters(), lr=0.05)]))
    training.model, training.optimizer = bundle.models[0], bundle.optimizers[0]
    start = training.weights()
    losses, _ = training.train()
    training.save(Path(folder))
    weights = training.weights()
    after, _ = training.train()
    training.load(Path(folder))
    loaded = training.weights()
    return {
        "in_memory": in_memory,
        "start": start,
        "losses": losses,
        "weights": weights,
        "loaded": loaded,
        "after": after,
        "after_loading": training.train()[0],
    }


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_model_is_built_in_the_parts_of_each_process(
    importable: None, processes: Callable[[int], Processes], tmp_path: Path, schedule: str
) -> None:
    case = case_of(schedule, ParallelismConfig(axes={"pp": 2})).but(clip_norm=None)
    of_pipeline, of_one = tmp_path / "pipeline", tmp_path / "one"
    of_pipeline.mkdir()
    of_one.mkdir()
    answers = processes(2).run(train_in_parts, case, str(of_pipeline))
    alone_case = case.but(manifest=SINGLE, config=None, parallelism_config=None)
    (alone,) = processes(1).run(train_in_parts, alone_case, str(of_one))
    layers = {name.partition(".")[0] for name in alone["in_memory"]}
    own = [{name.partition(".")[0] for name in answer["in_memory"]} for answer in answers]
    assert layers == own[0] | own[1] == {"0", "2", "3", "4"}
    assert not own[0] & own[1]
    for answer in answers:
        assert answer["start"] == alone["start"]
        assert answer["losses"] == near(alone["losses"])
        assert answer["weights"] == near(alone["weights"])
        assert answer["loaded"] == answer["weights"]
        assert answer["after_loading"] == answer["after"] == near(alone["after"])


def test_samples_are_divided_along_the_axes_of_data_alone() -> None:
    config = ParallelismConfig(dp_replicate_size=2, axes={"pp": 2})
    assert config.active_mesh_dims == ["pp", "dp_replicate"]
    assert (config.data_parallel_size, config.total_size) == (2, 4)
