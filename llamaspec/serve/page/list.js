// The list of conversations, and the search among them.

import { $, button, element } from "./dom.js";
import { everyMessage } from "./versions.js";

// Shows the conversations that contain the words of the search field, latest first.
export function showList(chats, current, { isRunning, open, rename, discard }) {
  const wanted = $("search").value.trim().toLowerCase();
  const found = [...chats.values()].filter((chat) => contains(chat, wanted)).sort((a, b) => b.changed - a.changed);
  const items = found.map((chat) => {
    const title = button(chat.title, () => open(chat), "title");
    if (chat === current) title.setAttribute("aria-current", "true");
    const change = button("Rename", () => rename(chat));
    const remove = button("Delete", () => discard(chat));
    change.setAttribute("aria-label", `Rename ${chat.title}`);
    remove.setAttribute("aria-label", `Delete ${chat.title}`);
    return element("li", isRunning(chat) ? "running" : "", title, element("span", "tools", change, remove));
  });
  $("search").hidden = !chats.size;
  $("list").replaceChildren(...items);
  if (chats.size && !found.length) $("list").append(element("li", "faint", "No chat contains this."));
}

function contains({ title, messages }, wanted) {
  if (!wanted || title.toLowerCase().includes(wanted)) return true;
  return [...everyMessage(messages)].some(({ content }) => content.toLowerCase().includes(wanted));
}
