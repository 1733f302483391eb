// The text files that are attached to the next message.

import { $, button, element } from "./dom.js";
import { size } from "./view.js";

export const LARGEST_FILE = 256000; // bytes

let files = []; // {name, text}

export const hasFiles = () => files.length > 0;

// Returns the attached files, and removes them.
export function takeFiles() {
  const taken = files;
  files = [];
  showFiles();
  return taken;
}

// Attaches files that are small enough and text. Returns what is wrong with another one; "" if nothing is.
export async function attach(chosen) {
  let problem = "";
  for (const file of chosen) {
    if (file.size > LARGEST_FILE) problem = `${file.name} is larger than ${LARGEST_FILE / 1000} kB.`;
    else {
      try {
        const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
        if (text.includes("\0")) throw new Error("binary");
        files.push({ name: file.name, text });
      } catch {
        problem = `${file.name} is not a text file.`;
      }
    }
  }
  showFiles();
  return problem;
}

function showFiles() {
  const items = files.map((file) => {
    const remove = button("Remove", () => {
      files = files.filter((other) => other !== file);
      showFiles();
    });
    remove.setAttribute("aria-label", `Remove ${file.name}`);
    return element("li", "", `${file.name}, ${size(file.text)} `, remove);
  });
  $("files").replaceChildren(...items);
}

// Returns a file as a fenced block, below its name.
export function fenced({ name, text }) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}
