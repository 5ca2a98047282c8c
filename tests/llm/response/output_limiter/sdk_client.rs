//! A client that checks the order of events as the SDKs do, and fails if the order is wrong.

use std::collections::{BTreeMap, BTreeSet};

use cogni_gateway::llm::protocol::GatewayRoute;
use serde_json::{Value, json};

/// The state in which a stream may be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SdkState {
    Ended,
    Sound,
    Halfway,
}

#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
#[derive(Debug)]
pub(super) struct SdkClient {
    route: GatewayRoute,
    /// The terminator has arrived.
    pub(super) done: bool,
    pub(super) failed: bool,
    /// An answer ended at its limit.
    pub(super) is_limited: bool,
    /// The output tokens of the last report.
    pub(super) usage: Option<u64>,
    /// The number of texts that are not empty, and their length in JSON.
    pub(super) pieces: u64,
    pub(super) bytes: u64,
    envelope: Option<Value>,
    /// Chat: the unfinished choices, those inside a tool call, and those inside reasoning.
    open: BTreeSet<u64>,
    in_tools: BTreeSet<u64>,
    in_thinking: BTreeSet<u64>,
    /// Messages: the open block and its type.
    block: Option<(u64, String)>,
    has_stopped: bool,
    /// Responses: the next sequence number, the open items by index, the text of each, and the finished items.
    sequence: u64,
    items: BTreeMap<u64, Value>,
    texts: BTreeMap<u64, String>,
    output: Vec<Value>,
}

impl SdkClient {
    pub(super) fn new(route: GatewayRoute) -> Self {
        Self {
            route,
            done: false,
            failed: false,
            is_limited: false,
            usage: None,
            pieces: 0,
            bytes: 0,
            envelope: None,
            open: BTreeSet::new(),
            in_tools: BTreeSet::new(),
            in_thinking: BTreeSet::new(),
            block: None,
            has_stopped: false,
            sequence: 0,
            items: BTreeMap::new(),
            texts: BTreeMap::new(),
            output: vec![],
        }
    }

    pub(super) fn read(&mut self, events: &str) {
        let rest = events.strip_suffix("\n\n").expect("an event is not whole");
        for event in rest.split("\n\n") {
            assert!(!self.done && !self.failed, "{event:?} comes after the end");
            let (head, data) = event.split_once("data: ").unwrap();
            if data == "[DONE]" {
                assert!(self.open.is_empty(), "an answer has no end");
                self.done = true;
                continue;
            }
            let event: Value = serde_json::from_str(data).unwrap();
            match self.route {
                GatewayRoute::Messages | GatewayRoute::Responses => {
                    let name = event["type"].as_str().unwrap();
                    assert_eq!(head, format!("event: {name}\n"));
                    if self.route == GatewayRoute::Messages {
                        self.message(name, &event);
                    } else {
                        self.response(name, &event);
                    }
                }
                _ => self.chunk(&event),
            }
        }
    }

    pub(super) fn state(&self) -> SdkState {
        let is_call =
            |item: &Value| !["message", "reasoning"].contains(&item["type"].as_str().unwrap());
        let is_halfway = !self.in_tools.is_empty()
            || !self.in_thinking.is_empty()
            || self.block.as_ref().is_some_and(|(_, kind)| kind != "text")
            || self.items.values().any(is_call);
        let is_open = match self.route {
            GatewayRoute::Messages => self.envelope.is_some() && !self.has_stopped,
            GatewayRoute::Responses => self.envelope.is_some() && !self.done,
            _ => !self.open.is_empty(),
        };
        match (is_open, is_halfway) {
            (false, _) => SdkState::Ended,
            (true, true) => SdkState::Halfway,
            (true, false) => SdkState::Sound,
        }
    }

    /// Counts a text, and returns whether the value is one.
    fn count(&mut self, text: &Value) -> bool {
        let is_text = text.as_str().is_some_and(|text| !text.is_empty());
        if is_text {
            self.pieces += 1;
            self.bytes += text.to_string().len() as u64 - 2;
        }
        is_text
    }

    fn chunk(&mut self, chunk: &Value) {
        if !chunk["error"].is_null() {
            assert_eq!(chunk["error"]["code"], "output_limit_reached");
            self.failed = true;
            return;
        }
        let envelope = ["id", "object", "created", "model"].map(|member| &chunk[member]);
        let known = self.envelope.get_or_insert_with(|| json!(envelope));
        assert_eq!(*known, json!(envelope));
        if let Some(output) = chunk["usage"]["completion_tokens"].as_u64() {
            self.usage = Some(output);
        }
        for choice in chunk["choices"].as_array().unwrap() {
            let index = choice["index"].as_u64().unwrap();
            let (delta, is_older) = (&choice["delta"], self.route == GatewayRoute::Completions);
            assert_eq!(choice["text"].is_string(), is_older);
            assert_eq!(delta.is_object(), !is_older);
            self.open.insert(index);
            let texts = [&choice["text"], &delta["content"], &delta["refusal"]];
            if texts.map(|text| self.count(text)).contains(&true) {
                self.in_thinking.remove(&index);
            }
            self.count(&delta["reasoning_content"]);
            if delta["thinking_blocks"].is_array() && !self.in_tools.contains(&index) {
                self.in_thinking.insert(index);
            }
            for call in delta["tool_calls"].as_array().into_iter().flatten() {
                self.count(&call["function"]["arguments"]);
                self.in_tools.insert(index);
                self.in_thinking.remove(&index);
            }
            if let Some(reason) = choice["finish_reason"].as_str() {
                self.is_limited |= reason == "length";
                for open in [&mut self.open, &mut self.in_tools, &mut self.in_thinking] {
                    open.remove(&index);
                }
            }
        }
    }

    fn message(&mut self, name: &str, event: &Value) {
        let index = event["index"].as_u64();
        match name {
            "message_start" => self.envelope = Some(event["message"].clone()),
            "content_block_start" => {
                assert!(self.block.is_none() && !self.has_stopped);
                let kind = event["content_block"]["type"].as_str().unwrap();
                self.count(&event["content_block"]["name"]);
                self.block = Some((index.unwrap(), kind.to_owned()));
            }
            "content_block_delta" => {
                assert_eq!(self.block.as_ref().map(|block| block.0), index);
                for member in ["text", "partial_json", "thinking"] {
                    self.count(&event["delta"][member]);
                }
            }
            "content_block_stop" => assert_eq!(self.block.take().map(|block| block.0), index),
            "message_delta" => {
                assert!(self.block.is_none(), "a block is open");
                self.has_stopped = true;
                self.is_limited = event["delta"]["stop_reason"] == "max_tokens";
                self.usage = event["usage"]["output_tokens"].as_u64();
            }
            "message_stop" => {
                assert!(self.has_stopped);
                self.done = true;
            }
            "error" => {
                assert_eq!(event["error"]["code"], "output_limit_reached");
                self.failed = true;
            }
            _ => assert_eq!(name, "ping"),
        }
    }

    fn response(&mut self, name: &str, event: &Value) {
        assert_eq!(event["sequence_number"], self.sequence, "{event}");
        self.sequence += 1;
        let response = &event["response"];
        let index = event["output_index"].as_u64();
        let text = |index: u64| self.texts.get(&index).cloned().unwrap_or_default();
        match name {
            "response.created" => self.envelope = Some(response.clone()),
            "response.output_item.added" => {
                assert!(self.items.insert(index.unwrap(), event["item"].clone()).is_none());
            }
            "response.output_text.done" => assert_eq!(event["text"], text(index.unwrap())),
            "response.refusal.done" => assert_eq!(event["refusal"], text(index.unwrap())),
            "response.output_item.done" => self.item_done(index.unwrap(), &event["item"]),
            "response.completed" | "response.incomplete" => {
                self.ended(response);
                assert!(self.items.values().all(|item| item["type"] == "reasoning"));
                assert_eq!(response["error"], Value::Null);
                let reason = &response["incomplete_details"]["reason"];
                self.is_limited = name == "response.incomplete" && reason == "max_output_tokens";
                self.done = true;
            }
            "response.failed" => {
                self.ended(response);
                assert_eq!(response["error"]["code"], "insufficient_quota");
                self.failed = true;
            }
            _ if event["delta"].is_string() && !name.contains("summary") => {
                let text = self.texts.entry(index.unwrap()).or_default();
                text.push_str(event["delta"].as_str().unwrap());
                self.count(&event["delta"]);
            }
            _ => (),
        }
    }

    fn item_done(&mut self, index: u64, item: &Value) {
        let added = self.items.remove(&index).expect("an item ends that has not begun");
        assert_eq!([&added["id"], &added["type"]], [&item["id"], &item["type"]]);
        if item["type"] == "message" {
            let part = &item["content"][0];
            let text = part["text"].as_str().or(part["refusal"].as_str()).unwrap();
            assert_eq!(text, self.texts.get(&index).map_or("", String::as_str));
        }
        self.output.push(item.clone());
    }

    fn ended(&mut self, response: &Value) {
        let known = self.envelope.as_ref().unwrap();
        for member in ["id", "object", "created_at", "model"] {
            assert_eq!(response[member], known[member], "{member}");
        }
        assert_eq!(response["output"], json!(self.output));
        self.usage = response["usage"]["output_tokens"].as_u64();
        assert!(self.usage.is_some(), "{response}");
    }
}
