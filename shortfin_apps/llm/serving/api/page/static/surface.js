// Canvases that are redrawn after a change of their data, at most once per frame.

const NAMES = ["paper", "raised", "ink", "soft", "line", "decode", "prefill", "padding", "cached", "free"];
const waiting = new Set();
let frame = 0;
let colours = null;

/** Returns the colours of the current theme. */
export function palette() {
  if (!colours) {
    const style = getComputedStyle(document.documentElement);
    colours = Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`)]));
    colours.isDark = luminance(colours.paper) < 0.5;
  }
  return colours;
}

/** Redraws all `surfaces` in the colours of the new theme. */
export function repaint(surfaces) {
  colours = null;
  for (const surface of surfaces) surface.change();
}

export class Surface {
  /** `draw(context, width, height)`: draws the canvas; width and height are in CSS pixels. */
  constructor(canvas, draw) {
    this.canvas = canvas;
    this.draw = draw;
    this.context = canvas.getContext("2d");
    new ResizeObserver(() => this.change()).observe(canvas);
  }

  change() {
    waiting.add(this);
    if (!frame) frame = requestAnimationFrame(drawAll);
  }

  paint() {
    const { canvas, context } = this;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    const ratio = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = `11px ${getComputedStyle(canvas).fontFamily}`;
    if (width > 0) this.draw(context, width, height);
  }
}

function drawAll() {
  frame = 0;
  const surfaces = [...waiting];
  waiting.clear();
  for (const surface of surfaces) surface.paint();
}

function luminance(colour) {
  const [r, g, b] = colour.match(/[\d.]+/g).map(Number);
  return (0.3 * r + 0.6 * g + 0.1 * b) / 255;
}

export function label(context, text, x, y, colour, align = "left") {
  context.fillStyle = colour;
  context.textAlign = align;
  context.fillText(text, x, y);
}
