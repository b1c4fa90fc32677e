// Which part of a reply's text was drafted: the stream's tokens are matched with its text as both arrive.

const FAR = 64; // characters that are skipped at most to find a token

/** Pieces [section, text, kind] of a reply; kind is 1 for a drafted token, 0 for the target's own, and null for text without a token. */
export class Pieces {
  #texts = [];
  #tokens = [];

  /** Add new text by section, and the tokens that belong to the text so far; returns the pieces that are complete. */
  push(texts, tokens = []) {
    this.#texts.push(...texts.filter(([, text]) => text !== ""));
    this.#tokens.push(...tokens);
    const pieces = [];
    while (this.#tokens.length && this.#texts.length) {
      const [text, drafted] = this.#tokens[0];
      const [section, ahead] = this.#texts[0];
      if (text === "") {
        this.#tokens.shift();
      } else if (ahead.startsWith(text)) {
        pieces.push([section, text, drafted ? 1 : 0]);
        this.#take(text.length);
        this.#tokens.shift();
      } else if (text.startsWith(ahead) && this.#texts.length === 1) {
        break; // the rest of the token's text is still to come
      } else {
        const at = ahead.slice(0, FAR).indexOf(text);
        if (at > 0) pieces.push([section, this.#take(at), null]);
        else this.#tokens.shift(); // a token that is not shown, such as a marker
      }
    }
    return pieces;
  }

  /** The text that no token has come for yet, as pieces. */
  get rest() {
    return this.#texts.map(([section, text]) => [section, text, null]);
  }

  #take(length) {
    const [section, text] = this.#texts[0];
    if (length === text.length) this.#texts.shift();
    else this.#texts[0] = [section, text.slice(length)];
    return text.slice(0, length);
  }
}
