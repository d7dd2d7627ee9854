// Draws the page pool: a cell per page, in the colour of the request that owns the page.

import { palette } from "./surface.js";

export const FREE = 0;
export const CACHED = 1;
export const SHARED = 2;
export const UNLISTED = 3;
export const OWNED = 4;

/** Returns a request's colour; requests with consecutive serial numbers have distant hues. */
export function colourOf(id, isDark) {
  const serial = Number(id.split("/")[0].split(/[.-]/).at(-1)) || 0;
  return `oklch(${isDark ? 0.74 : 0.66} 0.13 ${((serial * 137.508) % 360).toFixed(1)})`;
}

/** Returns the side of a square cell so that `cells` cells fit into the area, at most 14 pixels. */
function sideOf(cells, width, height) {
  let side = Math.min(14, Math.floor(Math.sqrt((width * height) / Math.max(1, cells))));
  while (side > 1 && Math.ceil(cells / Math.floor(width / side)) * side > height) side -= 1;
  return Math.max(1, side);
}

/** Draws the page maps below each other. `marked`: index of the request to highlight, or -1. */
export function drawPool(context, width, height, maps, requests, marked) {
  let top = 0;
  const shown = maps.filter(Boolean);
  for (const map of shown) {
    drawMap(context, width, height / shown.length - 4, top, map, requests, marked);
    top += height / shown.length;
  }
}

function drawMap(context, width, height, top, map, requests, marked) {
  const colours = palette();
  const { runs } = map;
  let cells = 0;
  for (let i = 1; i < runs.length; i += 2) cells += runs[i];
  const side = sideOf(cells, width, height);
  const columns = Math.max(1, Math.floor(width / side));
  const size = side > 3 ? side - 1 : side;
  const owners = requests.map((request) => colourOf(request.id, colours.isDark));
  const plain = { [FREE]: colours.free, [CACHED]: colours.cached, [SHARED]: colours.ink, [UNLISTED]: colours.soft };
  let cell = 0;
  for (let i = 0; i < runs.length; i += 2) {
    const value = runs[i];
    context.fillStyle = plain[value] ?? owners[value - OWNED] ?? colours.soft;
    context.globalAlpha = marked >= 0 && value !== OWNED + marked ? 0.25 : 1;
    for (const end = cell + runs[i + 1]; cell < end; ) {
      const column = cell % columns;
      const y = top + Math.floor(cell / columns) * side;
      const inRow = Math.min(end - cell, columns - column); // one rectangle; the grid is drawn over it below
      context.fillRect(column * side, y, inRow * side, side);
      cell += inRow;
    }
  }
  context.globalAlpha = 1;
  if (size === side) return;
  context.fillStyle = colours.paper;
  const rows = Math.ceil(cells / columns);
  for (let column = 0; column < columns; column += 1) context.fillRect(column * side + size, top, 1, rows * side);
  for (let row = 0; row < rows; row += 1) context.fillRect(0, top + row * side + size, width, 1);
}
