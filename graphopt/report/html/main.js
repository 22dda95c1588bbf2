// Draws the page, and marks the body when it is drawn.

const begun = performance.now();

function drawFigures() {
  document.getElementById("figures").append(...DATA.figures.map(({ label, value, note }) =>
    el("div", {}, el("dt", {}, label), el("dd", {}, value, note && el("small", {}, note)))));
}

drawFigures();
drawBlocks();
drawMemory();
drawPlans();
drawPareto();
drawTensors();
drawTechniques();
drawBasis();
document.getElementById("footer").append(DATA.made);
addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
document.body.dataset.ready = Math.round(performance.now() - begun);
