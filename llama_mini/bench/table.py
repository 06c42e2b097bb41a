"""The report of a model as text, and what each row and column holds."""

from typing import Any

from ..cli import table

WAYS = {
    "plain": "Llama called with a cache, argmax, ids kept on the device, synchronised only at the ends",
    "all cores": "the same with the linear layers of one token on all cores (llama_mini/speed)",
    "compiled": "the same with fast_model in its place",
    "... stream": "through `stream`, which users call: every id comes back to Python",
    "transformers": "its greedy generate with sdpa on the same prompt",
    "... static": "the same with its static cache, compiled",
}
COLUMNS = {
    "+-": "after a median over the runs: half of the range that holds the middle half of them",
    "of reading": "seconds over those that reading the same files takes, from the page cache",
    "GFLOP/s": "arithmetic of the model's matrix products per second",
    "of matmul": "that rate over the rate of one large matrix product in its dtype",
    "GB/s": "load: of the files; decode: weights and filled cache of one step over its time",
    "of copy": "that rate over the rate of copying a large tensor, counted as one read and one write",
    "of read": "that rate over the rate of summing a large tensor: decoding only reads",
    "of linears": "time of F.linear alone, on one token with every weight in turn, over that of a step",
    "to transf.": "tokens/s over those of transformers, the faster of its ways",
    "same": "how many new tokens are the plain way's, up to the first in any row that is not",
    "first, s": "seconds of the first one-token step, which compiles, or finds that on disk",
}
PHASES = {
    "prefill": {
        "GFLOP/s": ("operations_per_second", "{:,.1f}", 1e-9),
        "of matmul": ("of_matmul", "{:.0%}", 1),
        "to transf.": ("to_transformers", "{:.2f}", 1),
    },
    "decode": {
        "GB/s": ("bytes_per_second", "{:,.1f}", 1e-9),
        "of copy": ("of_copy", "{:.0%}", 1),
        "of read": ("of_read", "{:.0%}", 1),
        "of linears": ("of_linears", "{:.0%}", 1),
        "to transf.": ("to_transformers", "{:.2f}", 1),
    },
}


def model_table(report: dict[str, Any]) -> str:
    """The report as text, and what each row and column holds."""
    model, memory, load, limits = (report[key] for key in ("model", "memory", "load", "limits"))
    peak, before = (f"{memory[key] / 1e6:,.0f} MB" for key in ("peak", "before"))
    rates = {key: both(limits[key], 1e-9) for key in ("copy", "read", "matmul")}
    line = f"matmul {rates['matmul']} GFLOP/s, bare linears {both(limits['linears'])} steps/s"
    weights = f"the weights of {model['weight_bytes'] / 1e6:,.0f} MB"
    about = [
        ["limits", f"copy {rates['copy']} GB/s, read {rates['read']} GB/s"],
        ["", line],
        ["memory", f"peak {peak}, {before} of it before {weights}"],
    ]
    if load:
        rate, share = both(load["bytes_per_second"], 1e-9, 2), load["of_reading"]["median"]
        line = f"{both(load['seconds'], 1, 3)} s, {rate} GB/s, {share:.2f} of reading"
        about.append(["load", line])
    if "peak_compiled" in memory:
        about[2][1] += f"; compiled {memory['peak_compiled'] / 1e6:,.0f} MB"
    parts = [
        f"{model['name']}: {model['parameters']:,} parameters, {model['dtype']} on {model['device']}; "
        f"batch {model['batch']}, {model['prompt_tokens']} prompt tokens, {model['new_tokens']} new, "
        f"{model['runs']} runs",
        table(about, left=2),
    ]
    shown = {"of reading"} if load else set()
    for phase, columns in PHASES.items():
        rows = [[phase, "tokens/s", "+-", *columns, *["same", "first, s"] * (phase == "decode")]]
        for way in report["ways"]:
            numbers, first = way[phase], way["first_step_seconds"]
            rates = numbers["tokens_per_second"]
            cells = [way["way"], *(f"{rates[key]:,.1f}" for key in ("median", "spread"))]
            for key, form, scale in columns.values():
                cells.append(form.format(numbers[key]["median"] * scale) if key in numbers else "")
            if phase == "decode":
                cells += [str(way["same_tokens"]), "" if first is None else f"{first:.1f}"]
            rows.append(cells)
        filled = [column for column in zip(*rows, strict=True) if any(column[1:])]
        shown |= {column[0] for column in filled}
        parts.append(table([*zip(*filled, strict=True)]))
    names = [way["way"] for way in report["ways"]]
    shown |= {*names, *(f"... {name.split(', ')[1]}" for name in names if ", " in name)}
    legend = [(name, text) for name, text in (WAYS | COLUMNS).items() if name in shown]
    return "\n\n".join([*parts, table(legend, left=2)])


def both(number: dict[str, float], scale: float = 1.0, digits: int = 1) -> str:
    """A median and its spread."""
    return f"{number['median'] * scale:,.{digits}f} +- {number['spread'] * scale:,.{digits}f}"
