// Keeps conversations and settings in the browser's local storage. Each has its own entry, so that two tabs do not overwrite
// each other.

const SETTINGS = "llamaspec/settings";
const CHAT = "llamaspec/chat/";
const KEPT = ["role", "content", "model", "reasoning", "files", "timings", "notes", "error"]; // fields of a message

export const newChat = () => ({
  id: `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`,
  title: "",
  changed: Date.now(), // milliseconds since 1970
  messages: [], // {role, content, ...}
});

// Stores a conversation; returns whether there was room for it.
export function saveChat({ id, title, changed, messages }) {
  const complete = messages.filter((message) => !message.live || message.timings);
  const kept = complete.map((message) => Object.fromEntries(KEPT.map((name) => [name, message[name]])));
  return write(CHAT + id, { id, title, changed, messages: kept });
}

export const deleteChat = (id) => localStorage.removeItem(CHAT + id);
export const saveSettings = (settings) => write(SETTINGS, settings);
export const loadSettings = () => read(SETTINGS) ?? {};

// Returns all conversations by their ids.
export function loadChats() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(CHAT));
  return new Map(keys.map(read).filter(isChat).map((chat) => [chat.id, chat]));
}

// Whether a value from outside is a conversation.
export function isChat(chat) {
  const isMessage = (m) => ["user", "assistant"].includes(m?.role) && typeof m.content === "string";
  return typeof chat?.id === "string" && Array.isArray(chat.messages) && chat.messages.every(isMessage);
}

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null; // not written by this page
  }
}

function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false; // full, or forbidden
  }
}
