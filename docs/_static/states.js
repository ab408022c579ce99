// The pictures of a control are shown one at a time, with buttons that go to the next and the previous one.
document.addEventListener("DOMContentLoaded", () => {
  for (const states of document.querySelectorAll(".states")) {
    const pictures = [...states.querySelectorAll("img")];
    const [back, next] = states.querySelectorAll("button");
    let place = 0;
    const show = (step) => {
      pictures[place].classList.remove("shown");
      place = (place + step + pictures.length) % pictures.length;
      pictures[place].classList.add("shown");
      states.querySelector("span").textContent = `${pictures[place].dataset.values} (${place + 1} of ${pictures.length})`;
    };
    back.addEventListener("click", () => show(-1));
    next.addEventListener("click", () => show(1));
    show(0);
  }
});
