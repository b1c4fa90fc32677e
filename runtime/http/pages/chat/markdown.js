// Markdown as elements. HTML in a reply is shown as text, an image as a link, and a sanitizer checks the rest.

import { marked } from "../vendor/marked.js";
import "../vendor/purify.js";
import { element } from "../shared/build.js";

const ALLOWED = {
  ALLOWED_TAGS: ["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "em", "strong", "del", "code", "pre", "blockquote", "ul", "ol", "li", "a", "table", "thead", "tbody", "tr", "th", "td"],
  ALLOWED_ATTR: ["href", "title", "align", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};
const escaped = (text) => text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);

marked.use({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ href, text }) => `<a href="${escaped(href)}">[image: ${escaped(text || href)}]</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

/** The elements of a Markdown text. */
export function rendered(text) {
  const fragment = globalThis.DOMPurify.sanitize(marked.parse(text), ALLOWED);
  for (const link of fragment.querySelectorAll("a[href]")) {
    Object.assign(link, { target: "_blank", rel: "noopener noreferrer nofollow" });
    link.addEventListener("click", (event) => confirm(`Open this address?\n\n${link.href}`) || event.preventDefault());
  }
  for (const table of fragment.querySelectorAll("table")) {
    const box = element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table" });
    table.replaceWith(box);
    box.append(table);
  }
  for (const block of fragment.querySelectorAll("pre")) {
    const box = element("div", { class: "code" });
    block.replaceWith(box);
    Object.assign(block, { tabIndex: 0 });
    box.append(block, copyButton(() => block.textContent, "Copy code"));
  }
  return fragment;
}

/** A button that copies a text, where the browser allows it. */
export function copyButton(text, words = "Copy") {
  if (!navigator.clipboard) return null; // only on localhost and over TLS
  const button = element("button", { type: "button", class: "small" }, words);
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text());
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = words), 1500);
  });
  return button;
}
