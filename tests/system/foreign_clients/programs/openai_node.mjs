// openai's client for JavaScript: `create`, and the helper that streams and runs functions.
import OpenAI from "openai";

const [url, scenario] = [process.argv[2], JSON.parse(process.argv[3])];
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: scenario.key, maxRetries: 0 });
const question = { role: "user", content: scenario.question };
const run = ({ city, days }) => `sleet for ${days} days in ${city}`;

async function whole() {
  const messages = [question];
  const tools = [{ type: "function", function: scenario.weather }];
  const found = { calls: [], reasoning: [], finish_reasons: [], usage: [] };
  for (;;) {
    const answer = await client.chat.completions.create({ model: scenario.model, messages, tools });
    const { message, finish_reason } = answer.choices[0];
    found.finish_reasons.push(finish_reason);
    found.reasoning.push(message.reasoning_content);
    found.usage.push([answer.usage.prompt_tokens, answer.usage.completion_tokens]);
    messages.push(message);
    for (const call of message.tool_calls ?? []) {
      const given = JSON.parse(call.function.arguments);
      found.calls.push([call.function.name, given]);
      messages.push({ role: "tool", tool_call_id: call.id, content: run(given) });
    }
    if (!message.tool_calls?.length) return { ...found, text: message.content };
  }
}

async function streamed() {
  const calls = [];
  const weather = (given) => {
    calls.push(["weather", given]);
    return run(given);
  };
  const tool = { ...scenario.weather, function: weather, parse: JSON.parse };
  const runner = client.chat.completions.runTools({
    model: scenario.model,
    messages: [question],
    tools: [{ type: "function", function: tool }],
    stream: true,
    stream_options: { include_usage: true },
  });
  let pieces = "";
  runner.on("content", (piece) => (pieces += piece));
  const text = await runner.finalContent();
  if (!pieces.endsWith(text)) throw new Error(`pieces: ${pieces}`);
  // of reasoning the helper keeps only the last piece of a stream, as of any field it does not know
  const answers = runner.allChatCompletions();
  return {
    calls,
    text,
    finish_reasons: answers.map((one) => one.choices[0].finish_reason),
    usage: answers.map(({ usage }) => [usage.prompt_tokens, usage.completion_tokens]),
  };
}

console.log(JSON.stringify({ whole: await whole(), streamed: await streamed() }));
