// Markdown as elements, also while it is being written.
//
// What a model writes is hostile. No HTML is ever made of it: markdown-it parses it, with HTML off,
// and what is known becomes elements of the kinds named here, the rest text. Nothing is loaded: an
// image is a link, and a link goes to http, https or mailto, when it is followed.

import { copyButton } from "../clipboard.js";
import { element } from "../elements.js";
import MarkdownIt from "../vendor/markdown-it.esm.min.mjs";

const INDENT = 3; // of examples in plain text: Markdown's own is four
const parser = new MarkdownIt({ html: false, linkify: false });
parser.inline.ruler.before("emphasis", "dunder", dunder);
parser.block.ruler.before("paragraph", "example", example);
const SCHEMES = ["http:", "https:", "mailto:"];
const CODES = ["fence", "code_block"];
const LEAST_HEADING = 4; // below the page's own
const TAGS = {
  paragraph_open: "p",
  bullet_list_open: "ul",
  ordered_list_open: "ol",
  list_item_open: "li",
  blockquote_open: "blockquote",
  thead_open: "thead",
  tbody_open: "tbody",
  tr_open: "tr",
  td_open: "td",
  strong_open: "strong",
  em_open: "em",
  s_open: "s",
};

// A text that grows at its end. Each update parses it again from its last block on (a paragraph, a
// list, a block of code, …), as what follows can change that one alone. Definitions of links, which
// can stand anywhere, count when the text is whole.
export class Markdown {
  element = element("div", { className: "markdown" });
  #label;
  #settled = 0; // characters before the last block
  #heading = LEAST_HEADING - 1; // level of the last heading before it
  #numCodes = 0; // blocks of code before it
  #last = null; // {node, token} of the last block
  #hasDefinitions = false;
  #isWhole = false;

  // label: what the text is, for those who hear it.
  constructor(label) {
    this.#label = label;
  }

  update(text, isWhole = false) {
    if (this.#isWhole) return;
    this.#isWhole = isWhole;
    const env = {};
    const source = text.slice(this.#settled);
    const blocks = blocksOf(parser.parse(source, env));
    this.#hasDefinitions ||= env.references !== undefined;
    if (isWhole && this.#hasDefinitions && this.#settled) {
      this.#settled = 0;
      this.#heading = LEAST_HEADING - 1;
      this.#numCodes = 0;
      this.#last = null;
      this.element.replaceChildren();
      this.#show(text, blocksOf(parser.parse(text, {})));
    } else this.#show(source, blocks);
  }

  // blocks: of the source, the first of which takes the place of the last that is shown.
  #show(source, blocks) {
    if (!blocks.length) return;
    if (this.#extend(blocks[0][0])) {
      if (blocks.length === 1) return;
      this.#numCodes += 1;
      blocks.shift();
    } else this.#last?.node.remove();
    for (const tokens of blocks.slice(0, -1)) this.element.append(this.#build(tokens));
    const last = blocks.at(-1);
    const settled = [this.#heading, this.#numCodes];
    const node = this.#build(last);
    [this.#heading, this.#numCodes] = settled; // it is built again
    this.element.append(node);
    this.#last = { node, token: last[0] };
    this.#settled += offsetOfLine(source, last[0].map[0]);
  }

  // A block of code that has grown is not made anew: a reader may be copying from it.
  #extend(token) {
    const before = this.#last?.token;
    if (!CODES.includes(token.type) || before?.type !== token.type || before.info !== token.info)
      return false;
    if (!token.content.startsWith(before.content)) return false;
    this.#last.node.querySelector("code").append(token.content.slice(before.content.length));
    this.#last.token = token;
    return true;
  }

  #build(tokens) {
    const root = document.createDocumentFragment();
    const open = [root];
    const add = (token, next) => {
      if (token.type === "inline") token.children.forEach((child) => add(child, null));
      else if (token.nesting < 0) open.pop();
      else if (token.nesting > 0) {
        const made = token.hidden ? open.at(-1) : this.#container(token, next);
        const outer = made.closest?.(".table") ?? made;
        if (!token.hidden) open.at(-1).append(outer);
        open.push(made);
      } else open.at(-1).append(this.#leaf(token));
    };
    tokens.forEach((token, index) => add(token, tokens[index + 1]));
    return root.firstChild;
  }

  // next: the token behind it, which is the content of a heading or cell.
  #container(token, next) {
    switch (token.type) {
      case "heading_open":
        return this.#headingOf(token, next);
      case "link_open":
        return linkTo(token.attrGet("href"));
      case "table_open": {
        const table = element("table");
        element("div", this.#scrolling("table", "Table"), table);
        return table;
      }
      case "th_open":
      case "td_open":
        return cell(token, next);
      default: {
        const made = element(TAGS[token.type] ?? "span");
        if (token.attrGet("start") !== null) made.start = Number(token.attrGet("start"));
        return made;
      }
    }
  }

  // At most one level below the heading before, whatever the model wrote.
  #headingOf(token, next) {
    if (!next.content.trim()) return element("p");
    const wanted = LEAST_HEADING - 1 + Number(token.tag.slice(1));
    this.#heading = Math.min(wanted, this.#heading + 1, 6);
    return element(`h${this.#heading}`, { className: token.tag });
  }

  #leaf(token) {
    switch (token.type) {
      case "fence":
      case "code_block":
        return this.#code(token);
      case "code_inline":
        return element("code", { textContent: token.content });
      case "softbreak": // models mean the lines that they begin
      case "hardbreak":
        return element("br");
      case "hr":
        return element("hr");
      case "image": {
        const link = linkTo(token.attrGet("src"));
        link.append(`Image: ${token.content || token.attrGet("src")}`);
        return link;
      }
      default:
        return token.content;
    }
  }

  #code({ info, content }) {
    this.#numCodes += 1;
    const language = info.trim().split(/\s+/)[0].slice(0, 30);
    const name = `code block ${this.#numCodes} of ${this.#label.toLowerCase()}`;
    const code = element("code", { textContent: content });
    const copy = copyButton(`Copy ${name}`, () => code.textContent);
    const head = element(
      "div",
      { className: "code-head" },
      element("span", { textContent: language }),
      copy,
    );
    const pre = element("pre", this.#scrolling("", `${language} ${name}`.trim()), code);
    return element("div", { className: "code" }, head, pre);
  }

  // Properties of what may be wider than the page: it scrolls, by keyboard too.
  #scrolling(className, label) {
    return { className, tabIndex: 0, attributes: { role: "group", "aria-label": label } };
  }
}

// A rule of the parser: `__name__` is a name of Python's, not strong text, which models write
// with **.
function dunder(state, silent) {
  if (/\w/.test(state.src[state.pos - 1] ?? "")) return false;
  const name = /__\w+?__(?!\w)/y;
  name.lastIndex = state.pos;
  const found = name.exec(state.src)?.[0];
  if (!found) return false;
  if (!silent) state.pending += found;
  state.pos += found.length;
  return true;
}

// A rule of the parser: what is indented and begins no other block is code, down to where it ends.
function example(state, startLine, endLine, silent) {
  if (state.sCount[startLine] - state.blkIndent !== INDENT) return false;
  if (silent) return true;
  let end = startLine + 1;
  for (let line = end; line < endLine; line += 1) {
    if (state.isEmpty(line)) continue;
    if (state.sCount[line] - state.blkIndent < INDENT) break;
    end = line + 1;
  }
  const token = state.push("code_block", "code", 0);
  token.content = state.getLines(startLine, end, INDENT + state.blkIndent, true);
  token.map = [startLine, end];
  state.line = end;
  return true;
}

// The tokens of each block that is in no other.
function blocksOf(tokens) {
  const blocks = [];
  let depth = 0;
  for (const token of tokens) {
    if (token.nesting < 0) depth -= 1;
    if (depth === 0 && token.nesting >= 0) blocks.push([]);
    blocks.at(-1).push(token);
    if (token.nesting > 0) depth += 1;
  }
  return blocks;
}

// Where a line begins, in characters.
function offsetOfLine(text, line) {
  const ends = /\r\n?|\n/g;
  for (let each = 0; each < line; each += 1) ends.test(text);
  return ends.lastIndex;
}

function linkTo(address) {
  const url = URL.canParse(address ?? "") ? new URL(address) : null;
  if (!url || !SCHEMES.includes(url.protocol)) return element("span");
  return element("a", {
    href: url.href,
    title: url.href,
    target: "_blank",
    rel: "noopener noreferrer nofollow",
  });
}

// A cell; a heading without a word is none.
function cell(token, next) {
  const isHeading = token.type === "th_open" && next.content.trim();
  const made = isHeading ? element("th", { scope: "col" }) : element("td");
  made.style.textAlign = /text-align:(\w+)/.exec(token.attrGet("style") ?? "")?.[1] ?? "";
  return made;
}
