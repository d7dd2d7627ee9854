// The theme: light, dark, or the system's.

const NAME = "shortfin-llm-theme";
const CHOICES = [
  ["", "Auto", "as the system"],
  ["light", "Light", "light"],
  ["dark", "Dark", "dark"],
];

/** Connects the theme button. `onChange`: called when colours have changed. */
export function installTheme(onChange) {
  const button = document.getElementById("theme");
  let index = Math.max(0, CHOICES.findIndex(([scheme]) => scheme === localStorage.getItem(NAME)));
  const apply = () => {
    const [scheme, text, spoken] = CHOICES[index];
    document.documentElement.style.colorScheme = scheme || "light dark";
    button.textContent = text;
    button.setAttribute("aria-label", `Colours: ${spoken}`);
    onChange();
  };
  button.addEventListener("click", () => {
    index = (index + 1) % CHOICES.length;
    localStorage.setItem(NAME, CHOICES[index][0]);
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", onChange);
  apply();
}
