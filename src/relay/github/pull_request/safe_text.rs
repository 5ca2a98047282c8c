//! Makes an agent's text harmless for a page that notifies people, closes issues and loads pictures.
//!
//! A zero-width space behind each character that would start an action separates the character from the text after it.
//! The text looks the same, in a sentence and in code. The separation also holds if the page's text becomes a commit's
//! message, as squashing does.
//!
//! The separated texts are:
//!
//! - `@name`, which notifies.
//! - `#12` and `GH-12`, which refer to issues, and which close them after a word like `fixes`.
//! - Such a word before a URL.
//! - `](`, `][`, `]:`, `://` and `www.`, which make links.
//! - `![`, HTML tags and HTML comments, which load pictures, hide text, or end the relay's section.
//! - `&` before a name or a number, and `\` before `-` and `:`, which would write one of these characters differently.
//!
//! An open code block is closed, so that the relay's text behind it is not part of the block.

/// Returns a title of one line and limited length: the first line of `title` with text, or `otherwise`.
pub fn format_title(title: &str, otherwise: &str) -> String {
    let line: String =
        title.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default().into();
    let line = neutralize_markup(&truncate(&line, MAX_TITLE_CHARS));
    if line.is_empty() { otherwise.to_owned() } else { line }
}

/// Returns a text in one line of limited length. The caller puts the line into code quotes or a title.
pub fn format_line(given: &str, characters: usize) -> String {
    let words = given.split_whitespace().collect::<Vec<_>>().join(" ");
    truncate(&words, characters)
}

/// Returns a text as a code block that the text cannot end. Empty for a text without visible characters.
pub fn format_code_block(given: &str, characters: usize) -> String {
    let text = neutralize_markup(truncate(given.trim(), characters).trim()).replace('`', "'");
    if text.trim().is_empty() { String::new() } else { format!("```text\n{text}\n```") }
}

/// Returns the harmless form of a text of several paragraphs, in Markdown.
pub fn format_body(body: &str) -> String {
    close_code_block(&neutralize_markup(truncate(body, MAX_AGENT_TEXT_CHARS).trim()))
}

/// Returns a name in code quotes, for a sentence of the relay's.
pub fn format_code(name: &str) -> String {
    // A code span ends with its paragraph, so that a name with an empty line would leave it.
    let name = name.replace(['\n', '\t'], " ");
    format!("`{}`", neutralize_markup(&name).replace('`', "'"))
}

/// Removes unprintable characters, and separates every character that would start an action.
fn neutralize_markup(source: &str) -> String {
    let source: String = source.chars().filter(|&c| is_printable(c)).collect();
    let mut text = String::with_capacity(source.len());
    for (at, c) in source.char_indices() {
        text.push(c);
        let (before, after) = source.split_at(at + c.len_utf8());
        if triggers_action(c, before, after) {
            text.push(ZERO_WIDTH_SPACE);
        }
    }
    text
}

/// Returns the text with its last code block closed.
///
/// A code block that is indented by some columns may belong to a list item, and end with that item, or to no item. Such
/// a block is moved to the first column, where it belongs to no item.
fn close_code_block(source: &str) -> String {
    let (mut text, mut open) = (String::with_capacity(source.len()), None);
    // `open` is the fence that began the present block. Only a fence of the same character, at least as long, ends it.
    for line in source.split_inclusive('\n') {
        match (open, parse_fence(line)) {
            (None, Some(fence)) if fence.may_begin() => {
                open = Some((fence.sign, fence.length));
                text.push_str(line.trim_start_matches(' '));
            }
            (Some((sign, length)), Some(fence)) if fence.may_end(sign, length) => {
                open = None;
                text.push_str(line);
            }
            _ => text.push_str(line),
        }
    }
    if let Some((sign, length)) = open {
        let gap = if text.ends_with('\n') { "" } else { "\n" };
        text.push_str(gap);
        text.extend(std::iter::repeat_n(sign, length));
    }
    text
}

/// A line that begins or ends a code block.
struct CodeFence<'a> {
    sign: char,
    length: usize,
    /// The rest of the line.
    rest: &'a str,
}

/// Parses a fence: at least three equal marks, indented by at most three spaces (`CommonMark`).
fn parse_fence(line: &str) -> Option<CodeFence<'_>> {
    let marks = line.trim_start_matches(' ');
    let sign = marks.chars().next().filter(|sign| matches!(sign, '`' | '~'))?;
    let rest = marks.trim_start_matches(sign);
    let length = marks.len() - rest.len();
    let is_one = line.len() - marks.len() <= 3 && length >= 3;
    is_one.then(|| CodeFence { sign, length, rest: rest.trim_end_matches('\n') })
}

impl CodeFence<'_> {
    /// Returns true if the fence can begin a block. Text behind backticks must not have further backticks
    /// (`CommonMark`).
    fn may_begin(&self) -> bool {
        self.sign == '~' || !self.rest.contains('`')
    }

    /// Returns true if the fence ends a block that began with `length` times `sign`.
    fn may_end(&self, sign: char, length: usize) -> bool {
        self.sign == sign && self.length >= length && self.rest.trim_matches([' ', '\t']).is_empty()
    }
}

/// Returns true if a character, the last one of `before`, starts an action together with the text `after` it.
fn triggers_action(c: char, before: &str, after: &str) -> bool {
    let next = after.chars().next().unwrap_or_default();
    match c {
        '@' => next.is_ascii_alphanumeric(),
        '#' => next.is_ascii_digit(),
        '-' => next.is_ascii_digit() && ends_with_any(before, &["gh-"]),
        '!' => next == '[',
        ']' => matches!(next, '(' | '[' | ':'),
        ':' => after.starts_with("//"),
        'w' | 'W' if next == '.' => ends_with_any(before, &["www"]),
        '&' => next == '#' || next.is_ascii_alphabetic(),
        '\\' => matches!(next, '-' | ':'),
        '<' => next.is_ascii_alphabetic() || matches!(next, '/' | '!' | '?'),
        // The cheap test comes first: `is_before_address` walks over all blanks, and only runs behind a closing
        // keyword.
        _ => ends_with_any(before, CLOSING_KEYWORDS) && is_before_address(after),
    }
}

/// Returns true if a text begins with an optional colon, blanks and a URL, as in `: https://…`.
fn is_before_address(text: &str) -> bool {
    let rest = text.strip_prefix(':').unwrap_or(text);
    let address = rest.trim_start();
    let starts = |scheme: &str| {
        address.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme))
    };
    address.len() < rest.len() && (starts("http:") || starts("https:"))
}

/// Returns true if a text ends with one of the words, in any case.
fn ends_with_any(text: &str, words: &[&str]) -> bool {
    words.iter().any(|word| {
        let at = text.len().checked_sub(word.len());
        at.and_then(|at| text.get(at..)).is_some_and(|end| end.eq_ignore_ascii_case(word))
    })
}

/// Returns true if a character is neither a control character nor one that changes the direction of text.
fn is_printable(c: char) -> bool {
    let reorders =
        matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}');
    (!c.is_control() || matches!(c, '\n' | '\t')) && !reorders
}

/// Cuts a text to a number of characters, and marks the cut by `…`.
fn truncate(text: &str, characters: usize) -> String {
    let mut truncated: String = text.chars().take(characters).collect();
    if truncated.len() < text.len() {
        truncated.push('…');
    }
    truncated
}

/// The words with which GitHub closes an issue:
/// <https://docs.github.com/en/issues/tracking-your-work-with-issues/using-issues/linking-a-pull-request-to-an-issue>
const CLOSING_KEYWORDS: &[&str] =
    &["close", "closes", "closed", "fix", "fixes", "fixed", "resolve", "resolves", "resolved"];

/// A zero-width space, which separates characters and is not visible.
const ZERO_WIDTH_SPACE: char = '\u{200b}';

/// The longest title in characters. GitHub allows 256, and a separated character counts twice.
const MAX_TITLE_CHARS: usize = 120;

/// The longest text of an agent in characters: more than people read. GitHub's limit has room for several such texts.
const MAX_AGENT_TEXT_CHARS: usize = 8_000;
