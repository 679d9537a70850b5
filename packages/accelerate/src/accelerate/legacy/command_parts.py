"""Further parts of the original's commands: of its config command and its parsers."""

from __future__ import annotations

import argparse
import os
import sys
from argparse import ArgumentParser, HelpFormatter, Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any, Final

from accel_cli.command import spelled
from accel_cli.config.file import default_path
from accel_cli.config.wizard import prompter, questions
from accel_cli.config.write import modernised, nested, usual_config, write_config
from accel_cli.launch.backends import backends
from accel_cli.launch.devices import best_devices
from accel_cli.launch.options import launch_classes
from accel_cli.launch.settings import ASKED
from accel_state.choices import ComputeEnvironment, DynamoBackend
from accel_state.settings.run import RunSettings
from accel_state.settings.schema import settings_of
from accelerate.legacy.commands import launch_command
from accelerate.legacy.config_classes import BaseConfig, ClusterConfig, SageMakerConfig, default_json_config_file

__all__ = (
    "DYNAMO_BACKENDS",
    "CustomArgumentGroup",
    "CustomHelpFormatter",
    "SubcommandHelpFormatter",
    "clean_option",
    "config_description",
    "default_command_parser",
    "default_config_command",
    "default_description",
    "get_cluster_input",
    "get_sagemaker_input",
    "get_user_input",
    "launch_one",
    "merge_description",
    "options_to_group",
    "sagemaker_launcher",
    "update_command_parser",
    "update_config",
    "update_config_command",
    "update_description",
    "write_basic_config",
)

config_description: Final = "Write a config file for `accelerate launch`, by answering questions."
default_description: Final = "Write the usual config file for this machine."
update_description: Final = "Convert a config file to the current format."
merge_description: Final = "Merge the shards of a model into one file."

DYNAMO_BACKENDS: Final = [str(backend) for backend in DynamoBackend if backend is not DynamoBackend.NO]

options_to_group: Final = {
    "fp8_backend": "FP8 Arguments",
    "multi_gpu": "Distributed GPUs",
    "tpu": "TPU",
    "use_deepspeed": "DeepSpeed Arguments",
    "use_fsdp": "FSDP Arguments",
    "use_megatron_lm": "Megatron-LM Arguments",
}

CustomArgumentGroup: Final = argparse._ArgumentGroup

SubcommandHelpFormatter: Final = RawDescriptionHelpFormatter


class CustomHelpFormatter(HelpFormatter):
    """Formats the help of the original's parsers; `titles` are the sections that options on the command line select."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.titles = list(options_to_group.values())


def clean_option(option: str) -> str:
    """The heading for an option: its name without dashes and engine prefix."""
    name = option.lstrip("-").replace("fp8_", "").replace("fsdp_", "").replace("megatron_lm_", "")
    return name.replace("_", " ").capitalize()


def launch_one(args: Namespace) -> None:
    """Launch the parsed command; its arguments select the launcher."""
    launch_command(args)


def sagemaker_launcher(sagemaker_config: SageMakerConfig, args: Namespace) -> None:
    """Submit a job to SageMaker."""
    from accel_cli.launch.sagemaker import REQUIREMENT, SageMakerJob, hand_in
    from accelerate.legacy.launching import prepare_sagemager_args_inputs

    estimator, inputs = prepare_sagemager_args_inputs(sagemaker_config, args)
    REQUIREMENT.demand("Cannot submit a training job to SageMaker.")
    variables = {"AWS_PROFILE": sagemaker_config.profile or "", "AWS_DEFAULT_REGION": sagemaker_config.region}
    hand_in(SageMakerJob(estimator, inputs, {name: value for name, value in variables.items() if value}))


def get_user_input() -> BaseConfig:
    """Ask all questions and return the answers."""
    return get_cluster_input()


def get_cluster_input() -> ClusterConfig:
    """Ask the questions about a run on the user's machines."""
    offered = {one.name: one.settings for one in backends() if one.value is not None}
    answers = nested(questions(prompter(), ASKED, offered))
    known = {name: answers[name] for name in ClusterConfig.__dataclass_fields__ if name in answers}
    values = {"distributed_type": "NO", "mixed_precision": "no", **known}
    return ClusterConfig(**ClusterConfig.process_config(values))


def get_sagemaker_input() -> SageMakerConfig:
    """Ask the questions about a job on Amazon SageMaker."""
    asker = prompter()

    def needed(text: str) -> str | None:
        return None if text.strip() else "This question needs an answer."

    return SageMakerConfig(
        compute_environment=ComputeEnvironment.AMAZON_SAGEMAKER,
        distributed_type=asker.choose("Which distribution?", ("NO", "DATA_PARALLEL"), "NO"),  # type: ignore[arg-type]
        mixed_precision=asker.choose("Which mixed precision?", ("no", "fp16", "bf16", "fp8"), "no"),
        use_cpu=False,
        debug=False,
        ec2_instance_type=asker.ask("Which kind of machine?", "ml.p3.2xlarge", needed),
        iam_role_name=asker.ask("Which IAM role does the job use?", "", needed),
        profile=asker.ask("Which profile of the AWS command line?", "default", needed),
        region=asker.ask("Which region?", "us-east-1", needed),
        num_machines=int(asker.ask("How many machines?", "1", lambda text: None if text.isdecimal() else "A number.")),
    )


def write_basic_config(mixed_precision: str = "no", save_location: str = default_json_config_file) -> Path | bool:
    """Write the default config file for this machine; return False if the file exists already."""
    path = Path(save_location)
    precision = settings_of(RunSettings)["mixed_precision"].parse(mixed_precision, "argument")
    if path.exists():
        return False
    write_config(str(path), usual_config(best_devices(), precision))
    return path


def default_command_parser(parser: Any, parents: list[ArgumentParser]) -> ArgumentParser:
    """Add the subcommand that writes the default config file."""
    added: ArgumentParser = parser.add_parser("default", parents=parents, help=default_description)
    added.add_argument(*spelled("--config_file"), default=default_path(os.environ), dest="save_location")
    choices = settings_of(RunSettings)["mixed_precision"].type.choices
    added.add_argument(*spelled("--mixed_precision"), choices=choices, default="no")
    added.set_defaults(func=default_config_command)
    return added


def default_config_command(args: Namespace) -> None:
    """Write the default config file."""
    path = write_basic_config(args.mixed_precision, args.save_location)
    if path:
        sys.stdout.write(f"Written to {path}.\n")


def update_command_parser(parser: Any, parents: list[ArgumentParser]) -> ArgumentParser:
    """Add the subcommand that converts a file."""
    added: ArgumentParser = parser.add_parser("update", parents=parents, help=update_description)
    added.add_argument(*spelled("--config_file"), default=None)
    added.set_defaults(func=update_config_command)
    return added


def update_config(args: Namespace) -> str:
    """Convert a file to the current format and return its path."""
    path = str(args.config_file or default_path(os.environ))
    write_config(path, modernised(path, launch_classes()))
    return path


def update_config_command(args: Namespace) -> None:
    """Convert a file to the current format."""
    sys.stdout.write(f"Updated {update_config(args)}.\n")
