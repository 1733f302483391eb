// Keeps conversations and settings in the browser's local storage. Each has its own entry, so that two tabs do not overwrite
// each other.

import { CUT } from "./client.js";

const SETTINGS = "llamaspec/settings";
const CHAT = "llamaspec/chat/";
const KEPT = ["role", "content", "model", "reasoning", "files", "timings", "notes", "error", "seed", "cut"]; // of a message

export const newChat = (system = "") => ({
  id: `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`,
  title: "",
  system, // the system prompt
  changed: Date.now(), // milliseconds since 1970
  messages: [], // {role, content, ...}, and versions.js
});

// Stores a conversation; returns whether there was room for it.
export const saveChat = (chat) => write(CHAT + chat.id, storable(chat));

// Returns what is kept of a conversation.
export const storable = ({ id, title, system, changed, messages }) => ({ id, title, system: String(system ?? ""), changed, messages: messages.map(kept) });

function kept(message) {
  const versions = message.versions?.map((version) => version && version.map(kept));
  const fields = Object.fromEntries(KEPT.map((name) => [name, message[name]]));
  if (!message.live || message.timings) return { ...fields, versions };
  return { ...fields, versions, error: CUT, cut: Boolean(message.content || message.reasoning) }; // if the page is closed now
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
export const isChat = (chat) => typeof chat?.id === "string" && Array.isArray(chat.messages) && chat.messages.every(isMessage);

function isMessage(message) {
  const { role, content, versions } = message ?? {};
  return ["user", "assistant"].includes(role) && typeof content === "string" && (versions === undefined || areVersions(versions));
}

function areVersions(versions) {
  const isVersion = (version) => version === null || (Array.isArray(version) && version.length && version.every(isMessage));
  return Array.isArray(versions) && versions.filter((version) => version === null).length === 1 && versions.every(isVersion);
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
