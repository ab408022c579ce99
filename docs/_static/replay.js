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
