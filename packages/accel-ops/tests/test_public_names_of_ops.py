"""The package's list of names is the one that type checkers see, and using it costs no more than it must."""

from __future__ import annotations

import inspect
import subprocess
import sys

from accel_ops import collectives, conversion, objects, reduction, rng, shape, tree
from accel_testing.public_names import check_public_names


def test_names_for_type_checkers_and_at_run_time_are_the_same() -> None:
    check_public_names("accel_ops")


def test_parameters_and_defaults_are_those_that_callers_know() -> None:
    known = {
        collectives.broadcast: "(tensor, src=None, *, group=None)",
        collectives.scatter: "(tensor=None, src=None, *, group=None)",
        reduction.reduce: "(tensor, op='mean', scale=1.0, *, group=None)",
        reduction.reduce_scatter: "(tensor, op='sum', *, group=None)",
        objects.broadcast_object_list: "(object_list, src=None, *, group=None)",
        objects.gather_object: "(object, *, group=None)",
        shape.concatenate: "(data, dim=0)",
        shape.pad_across_processes: "(tensor, dim=0, pad_index=0, pad_first=False, *, group=None)",
        shape.pad_input_tensors: "(tensor, batch_size, num_processes, dim=0)",
        shape.slice_tensors: "(data, tensor_slice, process_index=None, num_processes=None)",
        conversion.send_to_device: "(tensor, device, non_blocking=False, skip_keys=None)",
        tree.honor_type: "(obj, generator)",
        conversion.convert_outputs_to_fp32: "(model_forward)",
        tree.find_batch_size: "(data)",
        rng.set_seed: "(seed, device_specific=False, deterministic=False)",
        rng.synchronize_rng_state: "(rng_type=None, generator=None)",
        rng.synchronize_rng_states: "(rng_types, generator=None)",
    }
    for function, expected in known.items():
        signature = inspect.signature(function)
        bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
        shown = inspect.Signature(bare)
        assert str(shown) == expected, function.__name__
    assert next(iter(inspect.signature(collectives.gather).parameters)) == "tensor"


def test_the_package_loads_no_torch_its_names_no_hang_report_and_walking_data_no_distributed_tensors() -> None:
    code = (
        "import sys, accel_ops; assert 'torch' not in sys.modules; "
        "[getattr(accel_ops, name) for name in accel_ops.__all__]; "
        "late = {'watch.report', 'watch.monitor', 'transport.control'}; "
        "assert not [name for name in late if f'accel_state.{name}' in sys.modules]; "
        "import torch; from accel_ops import gather; gather(torch.ones(1)); "
        "assert 'torch.distributed.tensor' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)
