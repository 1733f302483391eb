// Requests to the server of this page, and the events of its streams.

const UNREACHABLE = "The server does not answer. Is it still running?";
export const CUT = "The connection was lost before the answer was complete.";

// Returns what the server says about a model, by default the last one that was used: the drafts, the context.
export async function props(key, { model } = {}) {
  return (await ask(model ? `props?model=${encodeURIComponent(model)}` : "props", key)).json();
}

// Returns the models of the server that can chat, each with its id and status.
export async function models(key) {
  const listed = (await (await ask("v1/models", key)).json()).data;
  return listed.filter((model) => model.type === "completion");
}

// Yields the chunks of a chat answer; between them {loading} for the model, {waiting} in the queue, {processed, of} for the
// prompt, and {working} as a sign of life.
export async function* chat(body, key, signal) {
  const request = { method: "POST", body: JSON.stringify({ ...body, stream: true }), signal };
  const response = await ask("v1/chat/completions", key, request);
  for await (const line of lines(response)) {
    const [, processed, of] = /^: prompt (\d+)\/(\d+)$/.exec(line) ?? [];
    const [, loading] = /^: loading (.+)$/.exec(line) ?? [];
    if (loading) yield { loading };
    else if (of) yield { processed: Number(processed), of: Number(of) };
    else if (line === ": waiting") yield { waiting: true };
    else if (line === ": working") yield { working: true };
    else if (line === "data: [DONE]") return;
    else if (line.startsWith("data: ")) {
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
  throw new Error(CUT);
}

async function ask(path, key, request = {}) {
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...request, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error(UNREACHABLE);
  });
  if (response.ok) return response;
  if (response.status === 401) throw new Error("The server needs an API key: enter it in the settings.");
  const answer = await response.json().catch(() => ({}));
  throw new Error(answer.error?.message ?? `The server answered with status ${response.status}.`);
}

async function* lines(response) {
  const reader = response.body.getReader(); // not every browser can iterate over a body
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Error(CUT);
    });
    if (done) return;
    const found = (rest + decoder.decode(value, { stream: true })).split("\n");
    rest = found.pop();
    yield* found;
  }
}
