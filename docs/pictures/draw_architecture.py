"""Draws architecture.svg beside this file: what calls what. Run it after a change of the parts."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

INK, PAPER, SOFT, ACCENT, LINE = "#1c2430", "#ffffff", "#f1f4f8", "#dbe8ff", "#5b6b80"
WIDTH, HEIGHT = 960, 620
CAPTION = (
    "Each row of a batch may have another adapter, or none. Backends are found by entry points; "
    "choosing one changes no other line."
)


def box(
    x: int,
    y: int,
    width: int,
    height: int,
    title: str,
    lines: tuple[str, ...] = (),
    fill: str = SOFT,
) -> str:
    """A rectangle with a bold title and lines below it."""
    middle = x + width / 2
    text = [
        f'<text x="{middle}" y="{y + 24}" class="t" text-anchor="middle">{escape(title)}</text>'
    ]
    text += [
        f'<text x="{middle}" y="{y + 44 + 18 * i}" class="s" text-anchor="middle">{escape(line)}</text>'
        for i, line in enumerate(lines)
    ]
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}" stroke="{LINE}"/>'
        + "".join(text)
    )


def arrow(x1: int, y1: int, x2: int, y2: int, label: str = "", side: int = 8) -> str:
    """A line with a head, and words beside its middle."""
    line = f'<path d="M{x1} {y1} L{x2} {y2}" stroke="{LINE}" fill="none" marker-end="url(#head)"/>'
    if not label:
        return line
    x, y = (x1 + x2) / 2 + side, (y1 + y2) / 2 + 4
    anchor = "start" if side > 0 else "end"
    return line + f'<text x="{x}" y="{y}" class="s" text-anchor="{anchor}">{escape(label)}</text>'


def draw() -> str:
    """The whole picture."""
    parts = [
        box(40, 30, 250, 84, "Hugging Face model", ("attach(model)", "generate(adapter_names=[…])")),
        box(355, 30, 250, 84, "Engine", ("its own model code", "its own scheduler")),
        box(670, 30, 250, 84, "PEFT adapters", ("adapter_config.json", "adapter_model.safetensors")),
        box(40, 170, 565, 92, "Layers", (
            "linear, packed q|k|v and gate|up, embedding, lm_head, experts",
            "no batch or no adapter: exactly the module they wrap",
        )),
        box(670, 170, 250, 92, "LoRAManager", ("load, pin, evict, refresh, plan", "prepare and reset a batch")),
        box(670, 314, 250, 92, "Pool", ("A and B of every slot on the device", "host tier behind it")),
        box(40, 314, 565, 92, "The contract: LoRABackend, MoELoRABackend", (
            "prepare_batch · reset_batch_state · init_graph",
            "shrink · expand · linear · embedding · lm_head | route · gate_up · down",
        ), ACCENT),
        box(40, 468, 128, 84, "torch", ("plain torch", "any device")),
        box(186, 468, 128, 84, "triton", ("plugin", "CUDA")),
        box(332, 468, 128, 84, "csgmv", ("plugin", "CUDA")),
        box(478, 468, 127, 84, "yours", ("plugin", "entry point")),
        box(670, 468, 250, 84, "lora_core.testing", ("BackendConformance", "proves any of them right")),
        arrow(165, 114, 165, 168, "forward"),
        arrow(480, 114, 480, 168, "forward"),
        arrow(795, 114, 795, 168, "read once"),
        arrow(795, 262, 795, 312, "write a slot"),
        arrow(668, 216, 607, 216),
        arrow(668, 360, 607, 360),
        arrow(322, 262, 322, 312, "x, weights"),
        arrow(104, 406, 104, 466),
        arrow(250, 406, 250, 466),
        arrow(396, 406, 396, 466),
        arrow(541, 406, 541, 466),
        arrow(668, 510, 607, 510),
        f'<text x="{WIDTH // 2}" y="592" class="s" text-anchor="middle">{CAPTION}</text>',
    ]  # fmt: skip
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="DejaVu Sans, Verdana, sans-serif" role="img" aria-label="Architecture of lora_core">'
        f"<style>.t{{font-size:15px;font-weight:bold;fill:{INK}}}.s{{font-size:12.5px;fill:{INK}}}</style>"
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{LINE}"/></marker></defs>'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>' + "\n".join(parts) + "</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_name("architecture.svg").write_text(draw(), encoding="utf-8")
