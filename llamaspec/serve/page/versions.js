// Versions of a conversation. Editing a message or regenerating an answer replaces the messages from there on; what was
// there stays as another version. The message at that place has `versions`: lists of messages from there to the end, in
// the order in which they were made, and null for the one that is shown.

// Replaces the messages from `index` on by `message`. They stay as another version, unless they are an answer without text.
export function branch(messages, index, message) {
  const old = messages.splice(index, Infinity, message);
  const { role, content, reasoning, versions = [null] } = old[0];
  delete old[0].versions;
  if (role === "user" || content || reasoning) {
    versions[versions.indexOf(null)] = old;
    versions.push(null);
  }
  if (versions.length > 1) message.versions = versions;
}

// Shows the next version of the message at `index`, or the one before it if `step` is -1.
export function turn(messages, index, step) {
  const { versions } = messages[index];
  const from = versions.indexOf(null);
  const to = (from + step + versions.length) % versions.length;
  const old = messages.splice(index, Infinity, ...versions[to]);
  delete old[0].versions;
  versions[from] = old;
  versions[to] = null;
  messages[index].versions = versions;
}

// Yields the messages of all versions.
export function* everyMessage(messages) {
  for (const message of messages) {
    yield message;
    for (const version of message.versions ?? []) yield* everyMessage(version ?? []);
  }
}
