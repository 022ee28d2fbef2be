// The official JavaScript SDK, asked what the test says. argv: the package's folder, and a JSON list of
// {dialect, text, stream, tools}. Prints what came of each, one JSON line for each: {text, calls} or {error, ...}.
import { pathToFileURL } from "node:url";

const [, , folder, jobs] = process.argv;
const { default: OpenAI } = await import(pathToFileURL(`${folder}/index.mjs`));
const client = new OpenAI(); // finds base URL and key in the environment

async function chat({ text, stream, tools }) {
  const body = { model: "m", messages: [{ role: "user", content: text }], tools };
  const answer = stream
    ? await client.chat.completions.stream(body).finalChatCompletion()
    : await client.chat.completions.create(body);
  const { content, tool_calls } = answer.choices[0].message;
  return { text: content, calls: tool_calls?.map((call) => call.function.arguments) };
}

async function responses({ text, stream, tools }) {
  const body = { model: "m", input: text, tools };
  const answer = stream
    ? await client.responses.stream(body).finalResponse()
    : await client.responses.create(body);
  const calls = answer.output.filter((item) => item.type === "function_call").map((item) => item.arguments);
  return { text: answer.output_text, calls: calls.length ? calls : undefined };
}

for (const job of JSON.parse(jobs)) {
  let came;
  try {
    came = await { chat, responses }[job.dialect](job);
  } catch (error) {
    came = {
      error: error.constructor.name,
      status: error.status,
      sdk: error instanceof OpenAI.OpenAIError,
      message: String(error.message),
      cause: String(error.cause ?? ""),
    };
  }
  console.log(JSON.stringify(came));
}
