// The form asks again when something changes; sliders and number fields follow each other.
// Without this file the form still asks when its button is pressed.
"use strict";
(() => {
  const form = document.getElementById("ask");
  if (!form) return;
  document.documentElement.classList.add("scripted");

  // A slider steps through values, but says the one in force: the field's, or what the plan took for an open one.
  let taken = {};
  const valuesOf = (slider) => slider.dataset.values.split(",").map(Number);
  const numberOf = (text) => /^\d+(\.\d+)?$/.test(text) ? Number(text) : undefined;
  const worded = (value, unit) => `${value.toLocaleString("en-US")} ${value === 1 ? unit.replace(/s$/, "") : unit}`;
  const tellSlider = (slider) => {
    const {field: name, unit} = slider.dataset;
    const stated = document.getElementById(name).value.trim().replaceAll(",", "");
    const value = numberOf(stated) ?? taken[name];
    if (value !== undefined) {
      const distances = valuesOf(slider).map((step) => Math.abs(step - value));
      slider.value = distances.indexOf(Math.min(...distances));
    }
    const text = value !== undefined ? worded(value, unit) : stated || "-";
    slider.setAttribute("aria-valuetext", value === undefined && !stated ? "not chosen" : text);
    document.getElementById(`${slider.id}-value`).textContent = text;
  };
  const sliders = form.querySelectorAll("input[type=range]");
  for (const slider of sliders) {
    const field = document.getElementById(slider.dataset.field);
    slider.addEventListener("input", () => {
      field.value = valuesOf(slider)[slider.value];
      tellSlider(slider);
    });
    // What the last plan took is of no account for a question that has changed here.
    field.addEventListener("input", () => {
      delete taken[field.id];
      tellSlider(slider);
    });
  }

  // An answer says what it took for the fields; one that is being made leaves them as they are.
  const follow = () => {
    const effective = document.getElementById("effective");
    if (!effective && document.querySelector(".making")) return;
    taken = effective ? JSON.parse(effective.textContent) : {};
    for (const slider of sliders) {
      document.getElementById(slider.dataset.field).placeholder = taken[slider.dataset.field] ?? "";
      tellSlider(slider);
    }
    if (effective) document.getElementById("base").value = effective.dataset.base;
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

  document.addEventListener("htmx:load", () => { follow(); tell(); });
  follow();
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
})();
