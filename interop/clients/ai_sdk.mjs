// @ai-sdk/openai-compatible from npm, unmodified, against a running server: node ai_sdk.mjs URL MODEL
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
const require = createRequire(`${process.cwd()}/`);
const { createOpenAICompatible } = await import(require.resolve("@ai-sdk/openai-compatible"));
const { generateText, streamText } = await import(require.resolve("ai"));

const [url, name] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "aquiline", baseURL: `${url}/v1`, includeUsage: true });
const settings = { model: provider(name), prompt: "Name three colours.", temperature: 0, maxOutputTokens: 24, maxRetries: 0 };

const whole = await generateText(settings);
assert(whole.text.length > 0);
assert.equal(whole.finishReason, "length");
assert.equal(whole.usage.outputTokens, 24);

const stream = streamText(settings);
let streamed = "";
for await (const piece of stream.textStream) streamed += piece;
assert.equal(streamed, whole.text);
assert.equal((await stream.usage).outputTokens, 24);

const file = JSON.parse(readFileSync("node_modules/@ai-sdk/openai-compatible/package.json"));
console.log(JSON.stringify({ client: "@ai-sdk/openai-compatible", version: file.version, passed: true }));
