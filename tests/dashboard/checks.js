// What is asked of a page by the tests: it is evaluated there, and gives an object of functions.
((unseen) => ({
  /** Texts whose contrast with what is behind them is below the least that WCAG 2.1 wants (4.5, large ones 3). */
  faint() {
    const parts = (colour) => colour.match(/[\d.]+/g).map(Number);
    const channel = (c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
    const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
    const seen = (node) => {
      for (let at = node; at !== null; at = at.parentElement) {
        const rect = at.tagName === "g" ? at.querySelector("rect") : null;
        const colour = rect ? getComputedStyle(rect).fill : getComputedStyle(at).backgroundColor;
        if (colour !== "none" && !/, 0\)$/.test(colour)) return parts(colour);
      }
      return [255, 255, 255];
    };
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const element = walker.currentNode.parentElement;
      if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.closest(".hidden, .skip, noscript, title")) continue;
      const style = getComputedStyle(element);
      const [front, back] = [light(parts(element.namespaceURI.endsWith("svg") ? style.fill : style.color)), light(seen(element))];
      const contrast = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
      const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
      if (contrast < (large ? 3 : 4.5)) found.push(`${walker.currentNode.data.trim().slice(0, 30)} (${element.tagName}.${element.getAttribute("class")}): ${contrast.toFixed(2)}`);
    }
    return [...new Set(found)];
  },
  /** Elements that are wider than the window, beside those that scroll in a box of their own. */
  wide() {
    const boxes = [...document.body.querySelectorAll("*")].filter((node) => node.checkVisibility() && !node.closest(".scroll, .hidden, .skip") && !unseen(node));
    const sticking = boxes.filter((node) => node.getBoundingClientRect().right > innerWidth + 0.5);
    return sticking.map((node) => `${node.tagName}#${node.id} ${Math.round(node.getBoundingClientRect().right)}`);
  },
  /** Texts that are cut off by their box. */
  cut() {
    const leaves = [...document.body.querySelectorAll("*")].filter((node) => node.children.length === 0 && node.checkVisibility() && !node.closest(".hidden, .skip, svg, select"));
    return leaves.filter((node) => node.scrollWidth > node.clientWidth + 1 && node.clientWidth > 0).map((node) => `${node.tagName}: ${node.textContent.slice(0, 40)}`);
  },
  /** What has the focus, and whether that is to be seen. */
  focus() {
    const node = document.activeElement;
    const style = getComputedStyle(node);
    return { name: node.id || node.className || node.tagName, seen: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2 };
  },
}))((node) => node.closest("thead") !== null && getComputedStyle(node.closest("thead")).position === "absolute")
