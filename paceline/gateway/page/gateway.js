// What the page asks of the gateway over HTTP. It knows nothing of how answers are shown.

/** A refusal or a failure, in the gateway's words; `status` is that of HTTP, 0 for a failure within a stream. */
export class GatewayError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export class Gateway {
  /** Bearer token, kept in memory alone; empty: none. */
  token = "";

  async get(path, signal = null) {
    const response = await this.#fetch(path, { signal });
    return response.json();
  }

  /** Yield the chunks of a completion; raise GatewayError, or AbortError once `signal` aborts. */
  async *stream(path, body, signal) {
    const headers = { "Content-Type": "application/json" };
    const response = await this.#fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
    for await (const data of serverSentData(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new GatewayError(chunk.error.message);
      yield chunk;
    }
    throw new GatewayError("The stream broke off before its end.");
  }

  async #fetch(path, options) {
    const headers = { ...options.headers, ...(this.token && { Authorization: `Bearer ${this.token}` }) };
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new GatewayError("The gateway does not answer: is it running?");
    }
    if (!response.ok) throw await refusal(response);
    return response;
  }
}

async function refusal(response) {
  const body = await response.json().catch(() => null);
  const words = body?.error?.message ?? `The gateway answered with status ${response.status}.`;
  const retryAfter = response.headers.get("Retry-After");
  return new GatewayError(retryAfter ? `${words} Try again in ${retryAfter} s.` : words, response.status);
}

/** Yield the data of each event of a stream; ours have one line of it. */
async function* serverSentData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}
