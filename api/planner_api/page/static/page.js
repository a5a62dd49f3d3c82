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

  // One line for whoever listens, only when it is another one; complaints stand beside their fields, too.
  const answer = document.getElementById("answer"), line = document.getElementById("said");
  const tell = () => {
    const said = answer.querySelector("[data-said]")?.dataset.said ?? "";
    if (line.textContent !== said) line.textContent = said;
    for (const note of form.querySelectorAll("p.refused")) {
      const field = document.getElementById(note.dataset.of);
      field.removeAttribute("aria-invalid");
      const others = (field.getAttribute("aria-describedby") ?? "").split(" ").filter((id) => id && id !== note.id);
      if (others.length) field.setAttribute("aria-describedby", others.join(" "));
      else field.removeAttribute("aria-describedby");
      note.remove();
    }
    for (const link of answer.querySelectorAll("a[data-wrong]")) {
      const field = document.getElementById(link.dataset.wrong);
      const note = document.createElement("p");
      note.className = "refused";
      note.id = `${field.id}-wrong`;
      note.dataset.of = field.id;
      note.textContent = link.dataset.detail;
      field.after(note);
      field.setAttribute("aria-invalid", "true");
      field.setAttribute("aria-describedby", [field.getAttribute("aria-describedby"), note.id].filter(Boolean).join(" "));
      field.closest("details")?.setAttribute("open", "");
    }
  };
  // Addresses hold what was filled in, nothing else.
  document.addEventListener("htmx:configRequest", (event) => {
    const {parameters} = event.detail;
    for (const name of Object.keys(parameters)) if (parameters[name] === "") delete parameters[name];
  });

  document.addEventListener("htmx:load", (event) => { follow(event.detail.elt); tell(); });
  follow(document);
  tell();
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-wrong]");
    if (!link) return;
    event.preventDefault();
    document.getElementById(link.dataset.wrong).focus();
  });

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
    if (chosen) document.getElementById("download").href = `${chosen.dataset.download}&launcher=${chosen.value}`;
  });
})();
