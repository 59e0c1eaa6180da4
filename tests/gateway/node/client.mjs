// A user of the `openai` package: asks the gateway at the URL in the first argument, and checks what comes.
// tests/gateway/test_node.py says which text every output has.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, said, shown, call] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const { completions } = client.chat;
const model = "target";
const asked = { model, messages: [{ role: "user", content: "hi" }] };
const parameters = { type: "object", properties: { a: { type: "integer" } }, required: ["a"] };
const tools = [{ type: "function", function: { name: "add", parameters } }];

function hasCalled(message) {
  assert.equal(message.content, shown);
  assert.deepEqual(message.tool_calls.map(({ type, function: { name, arguments: own } }) => [type, name, own]), [
    ["function", "add", call],
  ]);
  assert.match(message.tool_calls[0].id, /^call_/);
}

const models = [];
for await (const one of client.models.list()) models.push(one.id);
assert.deepEqual(models, [model]);
assert.equal((await client.models.retrieve(model)).object, "model");

const whole = await completions.create(asked);
assert.equal(whole.choices[0].message.content, said);
assert.equal(whole.choices[0].finish_reason, "stop");
assert.ok(whole.usage.completion_tokens > 1);

const parts = [];
const stream = await completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) parts.push(chunk);
assert.equal(parts.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""), said);
assert.equal(parts.at(-1).usage.completion_tokens, whole.usage.completion_tokens);
assert.ok(parts.length > whole.usage.completion_tokens);

assert.equal((await client.completions.create({ model, prompt: "hi" })).choices[0].text, said);

const called = (await completions.create({ ...asked, tools })).choices[0];
assert.equal(called.finish_reason, "tool_calls");
hasCalled(called.message);
hasCalled((await completions.stream({ ...asked, tools }).finalChatCompletion()).choices[0].message);

await assert.rejects(completions.create({ ...asked, temperature: 3 }), (error) => {
  assert.ok(error instanceof OpenAI.BadRequestError);
  assert.deepEqual([error.status, error.type, error.param], [400, "invalid_request_error", "temperature"]);
  assert.match(error.message, /temperature/);
  return true;
});
await assert.rejects(completions.create({ ...asked, model: "another", stream: true }), (error) => {
  assert.ok(error instanceof OpenAI.NotFoundError);
  assert.equal(error.code, "model_not_found");
  return true;
});

const left = await completions.create({ ...asked, stream: true });
for await (const _ of left) break;
assert.ok(left.controller.signal.aborted);
