"""A finished training as a Hugging Face style folder: weights, configs, tokenizer and model card."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import load_model, load_tokenizer
from ..checkpoint.files import write_text
from ..checkpoint.saving import as_json, config_values, named_tensors, write_model
from ..generation import generate
from ..model import Llama
from ..placements import FAMILIES
from .corpus import BOS, EOS
from .evaluation import evaluate_folder
from .tokenizer_json import tokenizer_json

FILES = (
    "README.md config.json generation_config.json model.safetensors "
    "tokenizer.json tokenizer.model tokenizer_config.json"
).split()
# Of twenty stories each at six settings, read side by side, these kept to their subject best: below,
# sentences repeat; above, words appear that are none.
SAMPLING = {"temperature": 0.6, "top_p": 0.95}
CARD = """\
# {name}

A Llama of {parameters:,} parameters in bfloat16, trained from nothing by `llama_mini.train`. It is a
plain `LlamaForCausalLM` checkpoint: {num_hidden_layers} blocks of width {hidden_size},
{num_attention_heads} query and {num_key_value_heads} key/value heads, SwiGLU of width
{intermediate_size}, RMSNorm, tied embeddings, {vocab_size} tokens (SentencePiece BPE with byte
fallback), context {context}.

## Data

{data_note}

Trained on {documents} documents. The last {held_out} of the text are held out, from the tokenizer too.
The text (`{text}`, sha256 `{corpus}`)
is not part of this folder.

## Result

**Held-out loss: {per_character:.4f} nats per character** ({per_token:.4f} per token; a token is
{characters_per_token:.2f} characters).

That is the sum of -ln p over every token that follows in the held-out documents, each from its BOS to
its EOS, divided by their number of characters; beyond the context, each token is predicted from at
least half a context. Computed in float32 from the weights as they stand here, by

    {evaluate_command}

## Recipe

{steps} steps of at most {batch_tokens} tokens, {tokens:,} tokens seen in all, {epochs:.1f} passes over
the data. Muon for the matrices of the blocks, AdamW for the embedding and the norms. Learning rate
{learning_rate:g}: up over {warmup} steps, level, linear to 0 over the last {decay}. Weight decay
{weight_decay:g} on the matrices, gradients clipped to norm 1, seed {seed}. {minutes:.0f} minutes on
{threads} CPU threads with torch {torch}.

    {train_command}

Held-out loss by step: {curve}.

## Samples

From the BOS alone at temperature {temperature:g} and top_p {top_p:g}, the defaults in
generation_config.json, seed {seed}, the first three as they came out:

{samples}
"""


def write_checkpoint(out: Path, model: Llama, tokenizer: bytes) -> None:
    """Everything but the card; weights in bfloat16."""
    values = config_values(model.config, "bfloat16", BOS, EOS)
    settings = {
        # transformers takes tokenizer.json as it stands; LlamaTokenizer, there, puts no space before a
        # text that begins with one, which SentencePiece does.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
        "legacy": True,  # a space after a control token too, as the normalizer in tokenizer.json puts it
        "model_max_length": model.config.max_position_embeddings,
    }
    files = {
        "tokenizer.model": tokenizer,
        "tokenizer.json": (
            json.dumps(tokenizer_json(tokenizer), ensure_ascii=False) + "\n"
        ).encode(),
        "tokenizer_config.json": as_json(settings),
        "generation_config.json": as_json(
            {"bos_token_id": BOS, "eos_token_id": EOS, "do_sample": True} | SAMPLING
        ),
        "config.json": as_json(values),
    }
    tensors = named_tensors(model, FAMILIES["llama"])
    write_model(out, [(name, tensor.bfloat16()) for name, tensor in tensors], files)


def write_card(
    out: Path, state: dict[str, Any], text: str, data_note: str, held: Sequence[str], **facts: Any
) -> None:
    """The card of the checkpoint in `out`, which is measured as it stands there.

    `state` is that of the training, `text` the name of its file; `facts` are the other fields of CARD.
    """
    recipe = state["recipe"]
    per_character, per_token = evaluate_folder(out, held)
    command = f"python -m llama_mini.train --text {shlex.quote(text)}"
    name = shlex.quote(out.resolve().name)
    options = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in recipe.items())
    card = CARD.format(
        **recipe,
        **SAMPLING,
        **facts,
        name=out.resolve().name,
        data_note=data_note,
        text=text,
        corpus=state["corpus"],
        per_character=per_character,
        per_token=per_token,
        characters_per_token=per_token / per_character,
        tokens=state["tokens"],
        minutes=state["seconds"] / 60,
        torch=torch.__version__,
        curve=", ".join(f"{point[0]}: {point[-1]:.3f}" for point in state["curve"]),
        evaluate_command=f"{command} --evaluate {name} --held-out {recipe['held_out']}",
        train_command=f"{command} --out {name} {options} --data-note {shlex.quote(data_note)}",
        samples="\n\n---\n\n".join(map(quote, sample_texts(out, recipe["seed"]))),
    )
    write_text(out / "README.md", card)


def sample_texts(folder: Path, seed: int, number: int = 3) -> list[str]:
    """Texts of the checkpoint, from the BOS to an EOS or the end of the context."""
    model, tokenizer = load_model(folder, dtype=torch.float32), load_tokenizer(folder)
    generator = torch.Generator().manual_seed(seed)
    length = model.config.max_position_embeddings - 1
    outputs = generate(model, [[BOS]] * number, length, **SAMPLING, generator=generator)
    return [tokenizer.decode(ids) for ids in outputs]


def quote(text: str) -> str:
    """A text as a Markdown quotation, its lines as paragraphs."""
    return "\n>\n".join(f"> {line}" for line in text.split("\n"))
