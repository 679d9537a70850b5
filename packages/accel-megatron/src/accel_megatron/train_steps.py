"""Train steps for each kind of model: read a micro-batch, create positions and masks, run forward and the loss.

A mask is True where attention is not allowed, as in Megatron-LM.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from accel_megatron.parallel import (
    avg_losses_across_data_parallel_group,
    parallel_state,
    tensor_parallel,
    tools,
)
from accel_state.errors import DataError

__all__ = (
    "IGNORED",
    "AbstractTrainStep",
    "BertTrainStep",
    "GPTTrainStep",
    "T5TrainStep",
    "causal_mask",
    "hidden_between",
    "hidden_later",
    "positions",
    "shifted_left",
    "shifted_right",
    "train_step_for",
)

Batch = Mapping[str, Tensor]
LossFunction = Callable[..., Any]


class AbstractTrainStep(ABC):
    """One micro-batch of training; subclass it for other models.

    Args:
        name: name of the step in messages.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @abstractmethod
    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[[Iterator[Any]], Any]:
        """The function that reads a micro-batch from an iterator.

        Args:
            accelerator: has `device` and `state.megatron_lm_plugin`.
            megatron_dataset_flag: whether batches are those of Megatron's own datasets.
        """

    @abstractmethod
    def get_forward_step_func(self) -> Callable[[Iterator[Any], Any], tuple[Any, LossFunction]]:
        """The function that receives an iterator and the model, and returns the output and the loss function."""

    @abstractmethod
    def get_loss_func(self, accelerator: Any) -> LossFunction:
        """The loss function.

        It returns the sum of the losses, the number of their tokens, and a dict of values to report; or the mean loss
        and that dict.
        """


def _next(data_iterator: Iterator[Any] | None, device: torch.device) -> dict[str, Tensor]:
    """The next micro-batch, on the device."""
    if data_iterator is None:
        raise DataError(
            "Cannot read a batch for Megatron-LM.",
            "This process has no loader.",
            "Prepare the loader on every process.",
        )
    return {name: value.to(device) for name, value in next(data_iterator).items() if isinstance(value, Tensor)}


def _named(batch: Batch, name: str, kind: str) -> Tensor:
    if name not in batch:
        raise DataError(
            f"Cannot pass a batch to a {kind} of Megatron-LM.",
            f"It has no {name!r}; the batch has {', '.join(sorted(batch)) or 'nothing'}.",
            "Add it in the collate function.",
        )
    return batch[name]


def _summed(losses: Tensor, counted: Tensor, name: str = "lm loss") -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The sum of the losses of unmasked tokens, their number, and the data-parallel mean for the report."""
    weights = counted.float()
    total, number = (losses.float() * weights).sum(), weights.sum()
    if parallel_state.get_context_parallel_world_size() > 1:
        # Each process of the axis has a shard of the same sequence.
        whole = torch.stack([total.detach(), number])
        torch.distributed.all_reduce(whole, group=parallel_state.get_context_parallel_group())
        mean = whole[0] / whole[1].clamp(min=1)
    else:
        mean = total.detach() / number.clamp(min=1)
    return total, number.to(torch.int), {name: avg_losses_across_data_parallel_group([mean])[0]}


class GPTTrainStep(AbstractTrainStep):
    """A micro-batch of a decoder: each token is predicted from the previous ones.

    Batches have `input_ids` and optionally `attention_mask` and `labels`, in the format of transformers' models: labels
    are at the positions of their tokens, and -100 is ignored. Batches of Megatron's datasets have `text`, one token
    longer.

    Args:
        accelerator: has `device` and `state.megatron_lm_plugin`.
        args: settings with Megatron-LM's names.
    """

    def __init__(self, accelerator: Any, args: Any) -> None:
        super().__init__("GPTTrainStep")
        self.eod_mask_loss: bool = getattr(args, "eod_mask_loss", False)
        self.reset_position_ids: bool = getattr(args, "reset_position_ids", False)
        self.reset_attention_mask: bool = getattr(args, "reset_attention_mask", False)
        self.eod_token: int | None = getattr(getattr(args, "tokenizer", None), "eod", None)
        self.pad_token: int | None = getattr(getattr(args, "tokenizer", None), "pad", None)
        plugin = accelerator.state.megatron_lm_plugin
        self.return_logits = bool(plugin.return_logits)
        self.get_batch = _batch_function(self, accelerator, plugin)
        self.loss_func = _loss_function(self, accelerator, plugin)
        self.forward_step = self.get_forward_step_func()
        self.model_output_class = StepOutput

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[[Iterator[Any]], Any]:
        def get_batch(data_iterator: Iterator[Any]) -> dict[str, Tensor]:
            read = _next(data_iterator, accelerator.device)
            inputs = self._of_megatron(read) if megatron_dataset_flag else self._of_transformers(read)
            if parallel_state.get_context_parallel_world_size() > 1:
                return dict(tools.get_batch_on_this_cp_rank(inputs))
            return inputs

        return get_batch

    def _of_transformers(self, batch: Batch) -> dict[str, Tensor]:
        tokens = _named(batch, "input_ids", "GPT").long()
        seen = batch.get("attention_mask", torch.ones_like(tokens))
        targets = batch.get("labels", tokens.masked_fill(seen == 0, IGNORED))
        return self._named_inputs(tokens, shifted_left(targets.long()), seen)

    def _of_megatron(self, batch: Batch) -> dict[str, Tensor]:
        if "text" in batch:
            text = batch["text"].long()
            return self._named_inputs(
                text[:, :-1].contiguous(), text[:, 1:].contiguous(), torch.ones_like(text[:, :-1])
            )
        inputs = self._named_inputs(batch["tokens"].long(), batch["labels"].long(), torch.ones_like(batch["tokens"]))
        further = {name: batch[name] for name in ("loss_mask", "position_ids", "attention_mask") if name in batch}
        return {**inputs, **further}

    def _named_inputs(self, tokens: Tensor, targets: Tensor, seen: Tensor) -> dict[str, Tensor]:
        counted = targets != IGNORED
        if self.eod_mask_loss and self.eod_token is not None:
            counted &= tokens != self.eod_token
        ends = tokens == self.eod_token if self.eod_token is not None else torch.zeros_like(tokens, dtype=torch.bool)
        return {
            "tokens": tokens,
            "labels": targets.masked_fill(targets == IGNORED, 0),
            "loss_mask": counted,
            "position_ids": positions(tokens, ends if self.reset_position_ids else None),
            "attention_mask": causal_mask(seen, ends if self.reset_attention_mask else None),
        }

    def get_loss_func(self, accelerator: Any) -> LossFunction:
        def loss_func(loss_mask: Tensor, output_tensor: Any) -> Any:
            losses, logits = output_tensor if self.return_logits else (output_tensor, None)
            total, number, report = _summed(losses, loss_mask)
            return total, number, report if logits is None else {**report, "logits": logits}

        return loss_func

    def get_forward_step_func(self) -> Callable[[Iterator[Any], Any], tuple[Any, LossFunction]]:
        def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Any, LossFunction]:
            batch = self.get_batch(data_iterator)
            inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
            if self.return_logits and parallel_state.is_pipeline_last_stage():
                output = _with_logits(model, model(*inputs), batch["labels"])
            else:
                output = model(*inputs, labels=batch["labels"])
            return output, partial(self.loss_func, batch["loss_mask"])

        return forward_step


def _with_logits(model: Any, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The losses and the full logits of a decoder; the computation of the losses changes its input."""
    whole = tensor_parallel.gather_from_tensor_model_parallel_region(logits.detach().clone())
    loss_of = tools.get_attr_wrapped_model(model, "compute_language_model_loss")
    return loss_of(labels, logits.transpose(0, 1).contiguous()), whole


class BertTrainStep(AbstractTrainStep):
    """A micro-batch of a BERT: masked words and next-sentence prediction, or classification of a text.

    Batches have `input_ids`, `attention_mask`, `token_type_ids`, `labels` and, in pretraining, `next_sentence_label`.
    Batches of Megatron's datasets have `text`, `padding_mask`, `types`, `labels`, `loss_mask` and `is_random`.

    Args:
        accelerator: has `device` and `state.megatron_lm_plugin`.
        args: settings with Megatron-LM's names.
    """

    def __init__(self, accelerator: Any, args: Any) -> None:
        super().__init__("BertTrainStep")
        plugin = accelerator.state.megatron_lm_plugin
        self.get_batch = _batch_function(self, accelerator, plugin)
        custom = plugin.custom_loss_function
        self.loss_func = (
            self.get_loss_func(accelerator, args.pretraining_flag, args.num_labels)
            if custom is None
            else custom(accelerator)
        )
        self.forward_step = self.get_forward_step_func(args.pretraining_flag, args.bert_binary_head)
        self.model_output_class = StepOutput

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[[Iterator[Any]], Any]:
        def get_batch(data_iterator: Iterator[Any]) -> dict[str, Tensor]:
            read = _next(data_iterator, accelerator.device)
            return self._of_megatron(read) if megatron_dataset_flag else self._of_transformers(read)

        return get_batch

    @staticmethod
    def _of_megatron(batch: Batch) -> dict[str, Tensor]:
        return {
            "tokens": batch["text"].long(),
            "types": batch["types"].long(),
            "seen": batch["padding_mask"].long(),
            "labels": batch["labels"].long(),
            "loss_mask": batch["loss_mask"].float(),
            "sentence_order": batch["is_random"].long(),
        }

    @staticmethod
    def _of_transformers(batch: Batch) -> dict[str, Tensor]:
        tokens, labels = _named(batch, "input_ids", "BERT").long(), _named(batch, "labels", "BERT").long()
        inputs = {
            "tokens": tokens,
            "types": batch.get("token_type_ids", torch.zeros_like(tokens)).long(),
            "seen": batch.get("attention_mask", torch.ones_like(tokens)).long(),
            "labels": labels.masked_fill(labels == IGNORED, 0),
            "loss_mask": (labels != IGNORED).float(),
        }
        order = batch.get("next_sentence_label")
        return inputs if order is None else {**inputs, "sentence_order": order.long()}

    def get_loss_func(self, accelerator: Any, pretraining_flag: bool = True, num_labels: int = 2) -> LossFunction:
        if not pretraining_flag:
            return partial(_loss_of_class, num_labels)
        return _loss_of_pretraining

    def get_forward_step_func(
        self, pretraining_flag: bool = True, bert_binary_head: bool = True
    ) -> Callable[[Iterator[Any], Any], tuple[Any, LossFunction]]:
        def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Any, LossFunction]:
            batch = self.get_batch(data_iterator)
            types = batch["types"] if pretraining_flag or parallel_state.is_pipeline_first_stage() else None
            inputs = (batch["tokens"], batch["seen"])
            if not pretraining_flag:
                return model(*inputs, tokentype_ids=types), partial(self.loss_func, batch["labels"])
            order = batch.get("sentence_order") if bert_binary_head else None
            output = model(*inputs, tokentype_ids=types, lm_labels=batch["labels"])
            return output, partial(self.loss_func, batch["loss_mask"], order)

        return forward_step


def _loss_of_class(num_labels: int, labels: Tensor, output: Any) -> Any:
    _, logits = output
    if num_labels == 1:
        losses = torch.nn.functional.mse_loss(logits.view(-1).float(), labels.view(-1).float(), reduction="none")
    else:
        losses = torch.nn.functional.cross_entropy(
            logits.view(-1, num_labels).float(), labels.view(-1), reduction="none"
        )
    total, number, report = _summed(losses, torch.ones_like(losses), "loss")
    return total, number, {**report, "logits": logits.detach()}


def _loss_of_pretraining(loss_mask: Tensor, sentence_order: Tensor | None, output: Any) -> Any:
    losses, logits = output
    total, number, report = _summed(losses, loss_mask)
    if logits is None or sentence_order is None:
        return total, number, report
    order = torch.nn.functional.cross_entropy(logits.view(-1, 2).float(), sentence_order.view(-1), ignore_index=-1)
    mean = avg_losses_across_data_parallel_group([order])[0]
    # Both losses are means, but the engine divides their sum by the number of words.
    return total + order * number, number, {**report, "sop loss": mean}


class T5TrainStep(AbstractTrainStep):
    """A micro-batch of a model with an encoder and a decoder.

    Batches have `input_ids`, `attention_mask`, `labels` and optionally `decoder_input_ids`. Batches of Megatron's
    datasets have `text_enc`, `text_dec`, `labels`, `loss_mask`, and attention masks.

    Args:
        accelerator: has `device` and `state.megatron_lm_plugin`.
        args: settings with Megatron-LM's names.
    """

    def __init__(self, accelerator: Any, args: Any) -> None:
        super().__init__("T5TrainStep")
        plugin = accelerator.state.megatron_lm_plugin
        self._start = int(getattr(args, "decoder_start_token_id", 0) or 0)
        self.get_batch = _batch_function(self, accelerator, plugin)
        self.loss_func = _loss_function(self, accelerator, plugin)
        self.forward_step = self.get_forward_step_func()
        self.model_output_class = StepOutput

    @staticmethod
    def attn_mask_postprocess(attention_mask: Tensor) -> Tensor:
        """The attention mask for a padding mask: (batch, length) to (batch, length, length)."""
        return hidden_between(attention_mask, attention_mask)

    @staticmethod
    def get_decoder_mask(seq_length: int, device: torch.device) -> Tensor:
        """The causal attention mask of a decoder: (1, length, length)."""
        return hidden_later(seq_length, device)

    @staticmethod
    def get_enc_dec_mask(attention_mask: Tensor, dec_seq_length: int, device: torch.device) -> Tensor:
        """The cross-attention mask: (batch, decoder length, encoder length)."""
        return hidden_between(attention_mask.new_ones((attention_mask.shape[0], dec_seq_length)), attention_mask)

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[[Iterator[Any]], Any]:
        def get_batch(data_iterator: Iterator[Any]) -> dict[str, Tensor]:
            read = _next(data_iterator, accelerator.device)
            return self._of_megatron(read) if megatron_dataset_flag else self._of_transformers(read)

        return get_batch

    def _of_megatron(self, batch: Batch) -> dict[str, Tensor]:
        seen = batch["enc_mask"]
        inputs = self._named_inputs(batch["text_enc"].long(), batch["text_dec"].long(), batch["labels"].long(), seen)
        return {**inputs, "loss_mask": batch["loss_mask"].float()}

    def _of_transformers(self, batch: Batch) -> dict[str, Tensor]:
        tokens, labels = _named(batch, "input_ids", "T5").long(), _named(batch, "labels", "T5").long()
        decoder = batch.get("decoder_input_ids", shifted_right(labels, self._start)).long()
        return self._named_inputs(tokens, decoder, labels, batch.get("attention_mask", torch.ones_like(tokens)))

    def _named_inputs(self, tokens: Tensor, decoder: Tensor, labels: Tensor, seen: Tensor) -> dict[str, Tensor]:
        """All inputs of a step; an encoder mask that is already square is not changed."""
        per_token = seen if seen.dim() == 2 else seen.any(dim=-1)
        return {
            "tokens": tokens,
            "decoder_tokens": decoder,
            "labels": labels.masked_fill(labels == IGNORED, 0),
            "loss_mask": (labels != IGNORED).float(),
            "encoder_mask": self.attn_mask_postprocess(per_token),
            "decoder_mask": self.get_decoder_mask(decoder.shape[1], decoder.device).expand(len(decoder), -1, -1),
            "cross_mask": self.get_enc_dec_mask(per_token, decoder.shape[1], decoder.device),
        }

    def get_loss_func(self, accelerator: Any) -> LossFunction:
        def loss_func(loss_mask: Tensor, output_tensor: Tensor) -> Any:
            return _summed(output_tensor, loss_mask)

        return loss_func

    def get_forward_step_func(self) -> Callable[[Iterator[Any], Any], tuple[Any, LossFunction]]:
        masks: Final = ("encoder_mask", "decoder_mask", "cross_mask")

        def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Any, LossFunction]:
            batch = self.get_batch(data_iterator)
            # Attention needs a mask with a dimension for heads.
            inputs = (batch["tokens"], batch["decoder_tokens"], *(batch[name][:, None] for name in masks))
            return model(*inputs, lm_labels=batch["labels"]), partial(self.loss_func, batch["loss_mask"])

        return forward_step


class StepOutput(dict[str, Any]):
    """The engine's output of a step: `loss`, and `logits` on request; also as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _batch_function(step: AbstractTrainStep, accelerator: Any, plugin: Any) -> Callable[[Iterator[Any]], Any]:
    custom = plugin.custom_get_batch_function
    get_batch: Callable[[Iterator[Any]], Any] = (custom or step.get_batch_func)(
        accelerator, plugin.megatron_dataset_flag
    )
    return get_batch


def _loss_function(step: AbstractTrainStep, accelerator: Any, plugin: Any) -> LossFunction:
    loss_function: LossFunction = (plugin.custom_loss_function or step.get_loss_func)(accelerator)
    return loss_function


def train_step_for(accelerator: Any, args: Any) -> Any:
    """The train step for the kind of model, or the user-defined one of the settings."""
    plugin = accelerator.state.megatron_lm_plugin
    if plugin.custom_train_step_class is not None:
        return plugin.custom_train_step_class(**(plugin.custom_train_step_kwargs or {}))
    kinds: dict[str, Any] = {"gpt": GPTTrainStep, "bert": BertTrainStep, "t5": T5TrainStep}
    return kinds[args.model_type_name](accelerator, args)


IGNORED: Final = -100
"""The label that the loss ignores, as in torch and transformers."""


def shifted_left(labels: Tensor) -> Tensor:
    """For each token, the label of the next one; the last token has none. (batch, length)"""
    return torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), IGNORED)], dim=1)


def shifted_right(labels: Tensor, start: int) -> Tensor:
    """The decoder's inputs for labels: a start token, then the previous labels. (batch, length)"""
    filled = labels.masked_fill(labels == IGNORED, start)
    return torch.cat([filled.new_full((len(filled), 1), start), filled[:, :-1]], dim=1)


def _document(ends: Tensor) -> Tensor:
    """For each token, the number of its document; an end token belongs to the document that it ends."""
    return torch.cumsum(ends.long(), dim=1) - ends.long()


def positions(tokens: Tensor, ends: Tensor | None = None) -> Tensor:
    """The position of each token in the sequence or, with `ends`, in its document."""
    count = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    if ends is None:
        return count.contiguous()
    begins = torch.zeros_like(ends)
    begins[:, 1:] = ends[:, :-1]
    return count - torch.cummax(torch.where(begins, count, 0), dim=1).values


def causal_mask(seen: Tensor, ends: Tensor | None = None) -> Tensor:
    """The attention mask of a decoder: it masks later tokens, padding and, with `ends`, other documents.

    A token can always attend to itself, so that no row is empty.

    Args:
        seen: 1 for tokens, 0 for padding. (batch, length)
        ends: whether a token ends a document. (batch, length)

    Returns:
        (batch, 1, length, length)
    """
    length = seen.shape[1]
    hidden = hidden_later(length, seen.device) | (seen == 0)[:, None, :]
    if ends is not None:
        document = _document(ends)
        hidden = hidden | (document[:, :, None] != document[:, None, :])
    itself = torch.eye(length, dtype=torch.bool, device=seen.device)
    return (hidden & ~itself)[:, None]


def hidden_later(length: int, device: torch.device) -> Tensor:
    """The mask of later tokens, for each token. (1, length, length)"""
    return torch.ones((1, length, length), dtype=torch.bool, device=device).triu(1)


def hidden_between(looking: Tensor, looked_at: Tensor) -> Tensor:
    """The mask of pairs with a padding token. (batch, length of the first, length of the second)"""
    return (looking == 0)[:, :, None] | (looked_at == 0)[:, None, :]
