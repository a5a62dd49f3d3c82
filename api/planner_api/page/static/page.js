// The form asks again when something changes; sliders and number fields follow each other.
// Without this file the form still asks when its button is pressed.
"use strict";
(() => {
  const form = document.getElementById("ask");
  if (!form) return;
  document.documentElement.classList.add("scripted");
  const shown = (value) => Number(value).toLocaleString("en-US");

  const valuesOf = (slider) => slider.dataset.values.split(",").map(Number);
  const told = (slider) => {
    const text = `${shown(valuesOf(slider)[slider.value])} ${slider.dataset.unit}`;
    slider.setAttribute("aria-valuetext", text);
    document.getElementById(`${slider.id}-value`).textContent = text;
  };
  const place = (slider, value) => {
    const values = valuesOf(slider);
    let at = 0;
    values.forEach((step, index) => { if (step <= value) at = index; });
    slider.value = at;
    told(slider);
  };

  for (const slider of form.querySelectorAll("input[type=range]")) {
    const field = document.getElementById(slider.dataset.field);
    slider.addEventListener("input", () => {
      field.value = valuesOf(slider)[slider.value];
      told(slider);
    });
    field.addEventListener("input", () => { if (/^\d+$/.test(field.value)) place(slider, Number(field.value)); });
    told(slider);
  }

  // An answer says what it took for fields that were left open: the sliders stand there.
  const follow = (root) => {
    const effective = root.querySelector?.("#effective") ?? document.getElementById("effective");
    if (!effective) return;
    for (const [name, value] of Object.entries(JSON.parse(effective.textContent))) {
      const field = document.getElementById(name);
      field.placeholder = value;
      if (field.value === "") place(document.getElementById(`slide-${name}`), value);
    }
    document.getElementById("base").value = effective.dataset.base;
  };
  document.addEventListener("htmx:load", (event) => follow(event.detail.elt));
  follow(document);

  // A link to what is seen: the address holds the whole question.
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button[data-copy]");
    if (!button) return;
    const url = location.href;
    try {
      await navigator.clipboard.writeText(url);
      button.textContent = "Link copied";
    } catch {
      prompt("Copy this link", url);
    }
  });

  // The command to start depends on the chosen launcher: the download says which.
  document.addEventListener("change", (event) => {
    const chosen = event.target.closest("select[data-download]");
    if (chosen) document.getElementById("download").href = `${chosen.dataset.download}?launcher=${chosen.value}`;
  });
})();
