// The API key: asked for when the server wants one, and kept by the tab alone.

const NAME = "shortfin-llm-key";

let key = sessionStorage.getItem(NAME) ?? "";

export function headers() {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

export function hasKey() {
  return key !== "";
}

/** Connects the dialog. `onChange` is called when there is another key, or none. */
export function installKeyDialog(onChange) {
  const dialog = document.getElementById("key-dialog");
  const input = document.getElementById("key-input");
  const why = document.getElementById("key-why");
  document.getElementById("key-button").addEventListener("click", () => open(""));
  dialog.addEventListener("close", () => {
    if (dialog.returnValue !== "use") return;
    key = input.value.trim();
    if (key) sessionStorage.setItem(NAME, key);
    else sessionStorage.removeItem(NAME);
    onChange();
  });

  function open(reason) {
    if (dialog.open) return;
    why.textContent = reason || (key ? "Another key, or none to forget this one." : "A key, if this server has keys.");
    input.value = "";
    dialog.returnValue = "";
    dialog.showModal();
  }

  return open;
}
