// Formats numbers, and durations with their units.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(value) {
  return WHOLE.format(value);
}

/** Formats a rate, with one decimal below 10. */
export function rate(value) {
  return value > 0 && value < 9.95 ? value.toFixed(1) : WHOLE.format(value);
}

export function percent(part, whole) {
  if (!whole) return "–";
  const value = (100 * part) / whole;
  return value > 0 && value < 9.95 ? value.toFixed(1) : WHOLE.format(value);
}

/** Returns a duration as [number, unit]. */
export function duration(seconds) {
  if (seconds === null || !Number.isFinite(seconds)) return ["–", ""];
  if (seconds < 0.00995) return [(1000 * seconds).toFixed(1), "ms"];
  if (seconds < 0.9995) return [WHOLE.format(1000 * seconds), "ms"];
  if (seconds < 9.95) return [seconds.toFixed(2), "s"];
  return [seconds < 99.5 ? seconds.toFixed(1) : WHOLE.format(seconds), "s"];
}

export function durationText(seconds) {
  return duration(seconds).join(" ").trim();
}

export function age(seconds) {
  if (seconds < 99.5) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** Sets an element's text; an unchanged text does not touch the document. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
