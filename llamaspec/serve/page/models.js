// The menu of models. A server with one model shows only its name.

import { models } from "./client.js";
import { $, element } from "./dom.js";

const DEMO = "demo"; // the server's name for the pair that comes with llamaspec
const SIGNS = { loaded: " (loaded)", loading: " (loading…)" };

// Updates the menu; `preferred` is chosen unless another model is. Returns the names.
export async function updateMenu(key, preferred) {
  const found = await models(key);
  const menu = $("models");
  const names = found.map(({ id }) => id);
  const loaded = found.find(({ status }) => status?.value === "loaded")?.id;
  const chosen = [menu.value, preferred, loaded].find((name) => names.includes(name)) ?? names[0];
  const options = found.map(({ id, status }) => {
    const option = element("option", "", id + (SIGNS[status?.value] ?? ""));
    option.value = id;
    return option;
  });
  menu.replaceChildren(...options);
  menu.value = chosen;
  menu.hidden = names.length < 2;
  $("model").hidden = !menu.hidden;
  $("model").textContent = names[0] ?? "";
  $("demo").hidden = !(names.length === 1 && names[0] === DEMO);
}

// Returns the chosen model as a field of a request; none if there is only one.
export const chosenModel = () => ($("models").hidden ? {} : { model: $("models").value });
