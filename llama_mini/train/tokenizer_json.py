"""A trained SentencePiece model as a `tokenizer.json`, which transformers reads without protobuf."""

from typing import Any

import sentencepiece


def tokenizer_json(model: bytes) -> dict[str, Any]:
    """The `tokenizer.json` of a model that `train_tokenizer` made: the same ids and the same text.

    SentencePiece merges the two neighbours whose joint piece has the best score; tokenizers merges those
    that stand first in a list. Hence the list: all pairs that make a piece, best piece first.
    """
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    names = [pieces.id_to_piece(i) for i in range(pieces.get_piece_size())]
    special = [i for i in range(len(names)) if pieces.is_control(i) or pieces.is_unknown(i)]
    plain = {names[i]: i for i in range(len(names)) if i not in special and not pieces.is_byte(i)}
    merges = [
        [piece[:cut], piece[cut:]]
        for piece in sorted(
            plain, key=lambda piece: (-pieces.get_score(plain[piece]), plain[piece])
        )
        for cut in range(1, len(piece))
        if piece[:cut] in plain and piece[cut:] in plain
    ]
    exact = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    bos = names[pieces.bos_id()]
    one, two = (
        [{"SpecialToken": {"id": bos, "type_id": n}}, {"Sequence": {"id": text, "type_id": n}}]
        for n, text in enumerate("AB")
    )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": names[i], **exact, "special": True} for i in special],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": one,
            "pair": one + two,
            "special_tokens": {bos: {"id": bos, "ids": [pieces.bos_id()], "tokens": [bos]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": names[pieces.unk_id()],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {name: i for i, name in enumerate(names)},
            "merges": merges,
        },
    }
