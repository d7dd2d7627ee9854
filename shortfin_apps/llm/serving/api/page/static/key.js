// The API key. The page asks for a key if the server requires one; only this tab stores it.

const NAME = "shortfin-llm-key";

let key = sessionStorage.getItem(NAME) ?? "";

export function headers() {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

export function hasKey() {
  return key !== "";
}

/** Connects the dialog, and returns a function that opens it. `onChange`: called when the key has changed. */
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
