"""Evaluates a tiny model with lm-eval on three tasks of its own: python lm_eval_harness.py '{"folder": ...}'."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["ACCELERATE_USE_CPU"] = "true"  # before the original is imported

from datasets import Dataset
from lm_eval import simple_evaluate
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from tiny_text import WORDS, Texts, tell, tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

LAST = WORDS - 1


def save_base(folder: Path) -> None:
    """Writes a small model; transformers lets only the first process write once they are connected."""
    tiny_model(n_positions=64, bos_token_id=LAST, eos_token_id=LAST, pad_token_id=LAST).save_pretrained(folder)
    words = {f"w{number}": number for number in range(LAST)} | {"<end>": LAST}
    made = Tokenizer(WordLevel(words, unk_token="<end>"))
    made.pre_tokenizer = WhitespaceSplit()
    special = {"bos_token": "<end>", "eos_token": "<end>", "pad_token": "<end>"}
    PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=64, **special).save_pretrained(folder)


def documents(**nothing: Any) -> dict[str, Dataset]:
    """An odd number of texts, so that two processes have parts of unequal sizes."""
    rows = [[f"w{word}" for word in row.tolist()] for row in Texts(23).words % LAST]
    made = [
        {"start": " ".join(row[:6]), "whole": " ".join(row), "choices": [" ".join(row[6:8]), "w1 w2", "w3"], "right": 0}
        for row in rows
    ]
    return {"test": Dataset.from_list(made)}


COMMON = {"custom_dataset": documents, "test_split": "test", "doc_to_text": "{{start}}"}
MEAN = {"aggregation": "mean", "higher_is_better": True}
TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "right",
        "metric_list": [{"metric": "acc", **MEAN}, {"metric": "acc_norm", **MEAN}],
        "num_fewshot": 1,
        "fewshot_split": "test",
    },
    "whole texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{whole}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "continued": {
        "output_type": "generate_until",
        "doc_to_target": "{{whole}}",
        "generation_kwargs": {"until": ["w7"], "max_gen_toks": 5, "do_sample": False},
        "metric_list": [{"metric": "exact_match", **MEAN}],
    },
}


def main(folder: str, batch: int | str = 4, divided: bool = False, dtype: str = "float32") -> None:
    base = Path(folder) / f"base-{os.environ.get('RANK', '0')}"
    save_base(base)
    model = HFLM(pretrained=str(base), device="cpu", dtype=dtype, batch_size=batch)
    if divided:
        # What HFLM does itself where it sees several GPUs.
        model._rank, model._world_size = model.accelerator.process_index, model.accelerator.num_processes
    tasks = [ConfigurableTask(config={"task": name, **COMMON, **config}) for name, config in TASKS.items()]
    found = simple_evaluate(model, tasks=tasks, bootstrap_iters=0, random_seed=1, fewshot_random_seed=1)
    answers = {}
    if found is not None:
        answers = {
            name: [sample["filtered_resps"] for sample in sorted(samples, key=lambda one: one["doc_id"])]
            for name, samples in found["samples"].items()
        }
    results = {} if found is None else found["results"]
    scores = {name: {key: value for key, value in told.items() if "," in key} for name, told in results.items()}
    sizes = {} if found is None else {name: told["effective"] for name, told in found["n-samples"].items()}
    tell(scores=scores, answers=answers, sizes=sizes, processes=model.world_size)
    if divided:
        model.accelerator.end_training()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
