// A JupyterLab extension that adds a style sheet, starts moving pictures when they come into view, and closes the side
// bar in a narrow window. It's written as what a bundler would make of it, because it's so small.

const EXERCISE = '.jp-MarkdownCell:has(h3:is([id^="Exercise-"], [data-jupyter-id^="Exercise-"]))';

// Our pictures are dark on white. In a dark theme they keep their paper, a little darker, because texts name their colors.
const STYLE = `
body[data-jp-theme-light="false"] .jp-OutputArea .jp-RenderedImage img[src^="data:image/png"],
body[data-jp-theme-light="false"] .jp-MarkdownOutput img[src*="/pictures/"][src*=".svg"] {
  border-radius: 6px;
  filter: brightness(0.85);
}
#jp-left-stack {
  min-width: 290px !important;
}
/* "Your turn": one edge along an exercise's task, answer, hints, and check. */
${EXERCISE}, ${EXERCISE} + .jp-CodeCell, ${EXERCISE} + .jp-CodeCell + .jp-MarkdownCell,
${EXERCISE} + .jp-CodeCell + .jp-MarkdownCell + .jp-CodeCell {
  border-left: 4px solid #6a51a3;
}
.jp-MarkdownOutput details {
  border-left: 3px solid var(--jp-border-color1);
  margin-bottom: 1em;
  padding-left: 0.9em;
}
`;

// At once: JupyterLab measures its side bar when it starts.
const sheet = document.createElement("style");
sheet.textContent = STYLE;
document.head.append(sheet);

// What follows is docs/_static/replay.js, which the book uses, too.

// A moving picture plays twice as soon as the page is loaded, but its reader may scroll to it minutes later. So it starts
// again when it first comes into view, and whenever it's clicked. Without this, it stands still on its last moment.
{
  const isMoving = (node) => node instanceof HTMLImageElement && /\/(pictures|_images)\/\w+\.svg/.test(node.src);
  const play = (picture) => {
    const address = new URL(picture.src);
    address.searchParams.set("play", Date.now()); // a new address: the browser shows a known one at its last moment
    picture.src = address;
  };
  const seen = new WeakSet();
  const watch = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      watch.unobserve(target);
      play(target);
    }
  }, { threshold: 0.5 });
  const meet = (node) => {
    if (!isMoving(node) || node.src.includes("_frames.svg") || seen.has(node)) return;
    seen.add(node);
    node.title = "Click to play it again";
    watch.observe(node);
  };
  document.addEventListener("load", (event) => meet(event.target), true); // pictures don't bubble their load event
  document.addEventListener("click", (event) => seen.has(event.target) && play(event.target));
  document.querySelectorAll("img").forEach(meet);
}

// Below this width, the list of files would leave too little room for the text.
const activate = (app) => {
  app.restored.then(() => window.innerWidth < 1100 && app.shell.collapseLeft());
};

window._JUPYTERLAB = window._JUPYTERLAB ?? {};
window._JUPYTERLAB["tplab-look"] = {
  init: () => {},
  get: async () => () => ({ __esModule: true, default: { id: "tplab-look:style", autoStart: true, activate } }),
};
