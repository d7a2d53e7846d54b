// The openai package from npm, unmodified, against a running server: node openai_client.mjs URL MODEL
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
const require = createRequire(`${process.cwd()}/`);
const { default: OpenAI } = require("openai");

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Name three colours." }];
const settings = { model, messages, temperature: 0, max_tokens: 24 };

const whole = await client.chat.completions.create(settings);
const text = whole.choices[0].message.content;
assert(text.length > 0 && whole.usage.completion_tokens === 24);

let streamed = "", usage = null;
for await (const chunk of await client.chat.completions.create({ ...settings, stream: true, stream_options: { include_usage: true } })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, text);
assert.equal(usage.total_tokens, whole.usage.total_tokens);

const schema = { type: "object", properties: { colour: { enum: ["red", "blue"] } }, required: ["colour"], additionalProperties: false };
const typed = await client.chat.completions.create({
  ...settings, max_tokens: 60, response_format: { type: "json_schema", json_schema: { name: "c", schema, strict: true } },
});
assert(["red", "blue"].includes(JSON.parse(typed.choices[0].message.content).colour));

const runner = client.chat.completions.stream({ ...settings, max_tokens: 200 });
let pieces = 0;
await assert.rejects(async () => {
  for await (const _ of runner) if (++pieces === 3) runner.abort();  // leaves in mid-answer
}, OpenAI.APIUserAbortError);
assert.equal(pieces >= 3, true);

await assert.rejects(client.chat.completions.create({ ...settings, frobnicate: 1 }), error => error.status === 400 && error.param === "frobnicate");
assert.equal((await client.completions.create({ model, prompt: "The sky is", max_tokens: 3, temperature: 0 })).choices.length, 1);
assert.equal((await client.models.list()).data[0].id, model);
const file = JSON.parse(readFileSync("node_modules/openai/package.json"));
console.log(JSON.stringify({ client: "openai (npm)", version: file.version, passed: true }));
