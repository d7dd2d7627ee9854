// Reads server-sent events from a `fetch` response, because EventSource cannot send an API key.

/** Yields `{name, data}` for each event, and `{name: ""}` for a comment. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) yield parse(block);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(block) {
  let name = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) data.push(line.slice(6));
  }
  return data.length ? { name, data: data.join("\n") } : { name: "", data: "" };
}

/** Returns the message of an error response, in any of the server's formats. */
export async function errorMessage(response) {
  try {
    const { error } = await response.json();
    return (typeof error === "string" ? error : error.message) || response.statusText;
  } catch {
    return `${response.status} ${response.statusText}`.trim();
  }
}
