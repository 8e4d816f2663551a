// The AI SDK with its provider for servers that speak OpenAI's API: `generateText`, `streamText`.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const [url, scenario] = [process.argv[2], JSON.parse(process.argv[3])];
const provider = createOpenAICompatible({
  name: "slipstream",
  baseURL: `${url}/v1`,
  apiKey: scenario.key,
  includeUsage: true,
});

function options(calls) {
  return {
    model: provider(scenario.model),
    prompt: scenario.question,
    maxRetries: 0,
    stopWhen: stepCountIs(4),
    tools: {
      weather: tool({
        description: scenario.weather.description,
        inputSchema: jsonSchema(scenario.weather.parameters),
        execute: ({ city, days }) => {
          calls.push(["weather", { city, days }]);
          return `sleet for ${days} days in ${city}`;
        },
      }),
    },
  };
}

function shown(calls, steps, text) {
  return {
    calls,
    text,
    reasoning: steps.map((step) => step.reasoningText),
    finish_reasons: steps.map((step) => step.rawFinishReason),
    usage: steps.map((step) => [step.usage.inputTokens, step.usage.outputTokens]),
  };
}

async function whole() {
  const calls = [];
  const result = await generateText(options(calls));
  return shown(calls, result.steps, result.text);
}

async function streamed() {
  const calls = [];
  const result = streamText(options(calls));
  let pieces = "";
  for await (const piece of result.textStream) pieces += piece;
  const text = await result.text;
  if (!pieces.endsWith(text)) throw new Error(`pieces: ${pieces}`);
  return shown(calls, await result.steps, text);
}

console.log(JSON.stringify({ whole: await whole(), streamed: await streamed() }));
