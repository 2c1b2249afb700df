"""Tables and plots of benchmark results (`benchmark.py`)."""

import math
from collections import defaultdict
from pathlib import Path


def _mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def _geometric_mean(values) -> float:
    return math.exp(_mean(math.log(value) for value in values))


def _by_cell(results: dict) -> dict[tuple[float, int], dict[str, list[dict]]]:
    """Records of all domains, by (temperature, concurrency) and method."""
    cells: dict = defaultdict(lambda: defaultdict(list))
    for record in results["records"]:
        cells[record["temperature"], record["concurrency"]][record["method"]].append(record)
    return dict(sorted(cells.items()))


def markdown_table(results: dict) -> str:
    """Throughput against plain `generate` (geometric mean over domains), then our methods in detail."""
    cells = _by_cell(results)
    methods = list(dict.fromkeys(record["method"] for record in results["records"]))
    lines = [
        "| temperature | rows | plain tokens/s | " + " | ".join(m for m in methods if m != "plain") + " |",
        "| ---: | ---: | ---: |" + " ---: |" * (len(methods) - 1),
    ]
    for (temperature, rows), by_method in cells.items():
        plain = _mean(record["tokens_per_second"] for record in by_method["plain"])
        ratios = [
            f"{_geometric_mean(r['ratio'] for r in by_method[m]):.2f}x" if m in by_method else "–"
            for m in methods
            if m != "plain"
        ]
        lines.append(f"| {temperature:g} | {rows} | {plain:.1f} | " + " | ".join(ratios) + " |")
    lines += [
        "",
        "| temperature | rows | domain | method | ratio | tau (95 %) | verified per row and step | from lookup | "
        "draft share | verify pass / bare pass |",
        "| ---: | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (temperature, rows), by_method in cells.items():
        for method, records in by_method.items():
            for r in records:
                if "tau" not in r:
                    continue
                accepted = r["accepted_by_source"]
                lookup = accepted.get("lookup", 0) / max(1, sum(accepted.values()))
                draft = r["draft_seconds"] / (r["draft_seconds"] + r["verify_seconds"])
                floor = r["verify_seconds_per_pass"] / r["floor_seconds_per_pass"]
                lines.append(
                    f"| {temperature:g} | {rows} | {r['domain']} | {method} | {r['ratio']:.2f}x | {r['tau']:.2f} "
                    f"({r['tau_low']:.2f}–{r['tau_high']:.2f}) | {r['verified_per_step']:.2f} | {lookup:.0%} | "
                    f"{draft:.0%} | {floor:.2f} |"
                )
    env = results["environment"]
    lines += [
        "",
        f"`{env['command']}` on {env['device']}, {env['dtype']}, {env['threads']} threads (OMP_NUM_THREADS="
        f"{env['OMP_NUM_THREADS']}), torch {env['torch']}, transformers {env['transformers']}.",
    ]
    return "\n".join(lines)


def save_plots(results: dict, folder: Path) -> None:
    """`throughput.png` and `lengths.png` by concurrency, one curve per method, at the first temperature."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    cells = _by_cell(results)
    first = min(temperature for temperature, _ in cells)
    methods = list(dict.fromkeys(record["method"] for record in results["records"]))

    def curve(method: str, value):
        points = [
            (rows, _mean(value(record) for record in by_method[method]))
            for (temperature, rows), by_method in cells.items()
            if temperature == first and method in by_method
        ]
        return zip(*points, strict=True)

    figure, axes = plt.subplots(figsize=(6, 4))
    for method in methods:
        axes.plot(*curve(method, lambda r: r["tokens_per_second"]), marker="o", label=method)
    axes.set(xlabel="rows", ylabel="tokens per second", xscale="log", title="Throughput by concurrency")
    axes.legend()
    figure.savefig(folder / "throughput.png", dpi=120, bbox_inches="tight")

    figure, axes = plt.subplots(figsize=(6, 4))
    for method in methods:
        if any("tau" in record for record in results["records"] if record["method"] == method):
            (line,) = axes.plot(*curve(method, lambda r: r["tau"]), marker="o", label=f"{method}: accepted")
            axes.plot(
                *curve(method, lambda r: r["verified_per_step"]),
                "--",
                color=line.get_color(),
                label=f"{method}: verified",
            )
    axes.set(xlabel="rows", ylabel="tokens per row and step", xscale="log", title="Accepted and verified length")
    axes.legend()
    figure.savefig(folder / "lengths.png", dpi=120, bbox_inches="tight")
    plt.close("all")
