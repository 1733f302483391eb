// Exports all conversations as a JSON file, and imports such files.

import { isChat, storable } from "./store.js";

const KIND = "llamaspec-chats";

// Lets the browser save a file with the conversations.
export function exportChats(chats) {
  const content = JSON.stringify({ kind: KIND, version: 1, chats: [...chats].map(storable) }, null, 1);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type: "application/json" }));
  link.download = `llamaspec-chats-${new Date().toISOString().slice(0, 10)}.json`;
  link.click();
  URL.revokeObjectURL(link.href);
}

// Returns the conversations in a file; throws an error that says what is wrong.
export async function importedChats(file) {
  const content = await file.text().then(JSON.parse).catch(() => null);
  if (content?.kind !== KIND || !Array.isArray(content.chats)) {
    throw new Error(`${file.name} is not a file of chats that this page has exported.`);
  }
  return content.chats.filter(isChat).map((chat) => ({
    ...storable(chat),
    title: String(chat.title ?? "").slice(0, 200) || "Imported",
    changed: Number(chat.changed) || 0,
  }));
}
