//! Tests of prices: the price table, its arithmetic, and a run with a cost budget.

use std::sync::Arc;

use cogni_gateway::llm::budget::price::{ModelPrice, PriceConfig, PriceTable, UnknownPricePolicy};
use cogni_gateway::llm::budget::{
    BudgetLedger, BudgetLimits, Nanodollars, PriorUsage, ReserveRequest, TokenUsage, Tokens,
};
use proptest::prelude::*;

use crate::support::allocations;

/// The expected costs were computed by hand from the providers' price lists.
#[test]
fn each_kind_of_token_has_its_price() {
    let prices = PriceTable::load_table(&PriceConfig::default()).unwrap();
    let read = |model, input, output| {
        let usage =
            TokenUsage { input: Tokens(input), output: Tokens(output), ..TokenUsage::default() };
        format_cost(&prices, model, &usage)
    };
    // $5 per million input tokens and $25 per million output tokens.
    assert_eq!(read("claude-opus-4-5", 1_000, 1_000), "0.03");
    // A provider's prefix does not change the price.
    assert_eq!(read("anthropic/claude-opus-4-5", 1_000, 1_000), "0.03");
    // $0.02 per million input tokens; the model has no output.
    assert_eq!(read("text-embedding-3-small", 8, 0), "0.00000016");
    // $1.25 and $10 per million up to 200,000 input tokens; $2.50 and $15 above.
    assert_eq!(read("gemini-2.5-pro", 200_000, 1_000), "0.26");
    assert_eq!(read("gemini-2.5-pro", 200_001, 1_000), "0.5150025");

    // 11 uncached input tokens, 5 cache reads, 3 cache writes (one for five minutes, two for an hour) and 7 output
    // tokens.
    let cached = TokenUsage {
        input: Tokens(19),
        output: Tokens(7),
        cache_read: Tokens(5),
        cache_write: Tokens(3),
        cache_write_1h: Tokens(2),
        ..TokenUsage::default()
    };
    // 11×5000 + 5×500 + 1×6250 + 2×10000 + 7×25000 nanodollars.
    assert_eq!(format_cost(&prices, "claude-opus-4-5", &cached), "0.00025875");
}

/// G9: Audio has its own rate if the provider has one, and no model of the built-in table is free.
#[test]
fn sound_has_its_price_and_no_model_is_free() {
    let prices = PriceTable::load_table(&PriceConfig::default()).unwrap();
    let heard = |model| {
        let (input, audio_input) = (Tokens(1_000_000), Tokens(1_000_000));
        format_cost(&prices, model, &TokenUsage { input, audio_input, ..TokenUsage::default() })
    };
    assert_eq!(["gemini-2.5-flash", "gemini-embedding-2"].map(heard), ["1", "6.5"]);
    assert_eq!(heard("gemini-2.5-pro"), "2.5");
    let seen = |model| {
        let (input, image_input) = (Tokens(1_000_000), Tokens(1_000_000));
        format_cost(&prices, model, &TokenUsage { input, image_input, ..TokenUsage::default() })
    };
    assert_eq!(
        ["gemini-2.5-flash", "gemini-embedding-2", "gpt-5"].map(seen),
        ["0.3", "0.45", "1.25"]
    );
    assert!(prices.find_price("gemini-exp-1206").is_none());
    let table = toml::from_str::<toml::Table>(include_str!("../../../config/prices.toml")).unwrap();
    for (model, _) in table["models"].as_table().unwrap() {
        let price = prices.find_price(model).unwrap();
        assert!(!price.max_cost(Tokens(1_000_000), Tokens::ZERO).is_zero(), "{model}");
    }
}

/// G9: A policy setting decides about a model without a price.
#[test]
fn an_unknown_price_is_a_policy() {
    let of = |unknown: &str, counts_cost| {
        let config: PriceConfig = toml::from_str(&format!("unknown = {unknown}")).unwrap();
        PriceTable::load_table(&config).unwrap().price_for("vendor/unknown", || counts_cost)
    };
    let refused = of("\"reject\"", true).unwrap_err();
    insta::assert_snapshot!(refused, @"model `vendor/unknown` has no price, and this run has a cost budget; an operator can add the model to the price table or set `prices.unknown`");
    assert_eq!(of("\"reject\"", false), Ok(None));
    assert_eq!(of("\"tokens_only\"", true), Ok(None));
    let price = of(r#"{ input = "3", output = 15.5 }"#, true).unwrap().unwrap();
    assert_eq!(price.max_cost(Tokens(1_000_000), Tokens(1_000_000)).to_string(), "18.5");
}

/// G9: Price lookup, reservation and settlement allocate nothing.
#[test]
fn a_reservation_allocates_nothing() {
    let prices = PriceTable::load_table(&PriceConfig::default()).unwrap();
    let limits =
        BudgetLimits { max_cost_usd: Some(Nanodollars(u64::MAX)), ..BudgetLimits::default() };
    let ledger = Arc::new(BudgetLedger::new(limits, PriorUsage::default()));
    let call = || {
        let price = prices.price_for("anthropic/claude-opus-4-5", || true).unwrap();
        let ask = ReserveRequest {
            is_turn: true,
            input: Tokens(600),
            price,
            ..ReserveRequest::default()
        };
        // A call that was charged nothing would count towards the rate of free calls.
        let usage = TokenUsage { input: Tokens(600), ..TokenUsage::default() };
        let _ = ledger.reserve_call(&ask).unwrap().settle_usage(&usage);
    };
    call();
    assert_eq!(allocations::count_allocations(|| (0..1000).for_each(|_| call())), 0);
}

#[test]
fn a_family_has_the_price_of_its_longest_name() {
    let table = r#"
        version = "1"
        [models]
        "gpt-*" = { input = "1" }
        "gpt-5-*" = { input = "2" }
        "gpt-5-mini" = { input = "3" }
    "#;
    let prices = PriceTable::parse_table(table, UnknownPricePolicy::Reject).unwrap();
    let input = |model| {
        prices
            .find_price(model)
            .map(|price| price.max_cost(Tokens(1_000_000), Tokens::ZERO).to_string())
    };
    assert_eq!(input("gpt-4o").as_deref(), Some("1"));
    assert_eq!(input("openai/gpt-5-pro").as_deref(), Some("2"));
    assert_eq!(input("gpt-5-mini").as_deref(), Some("3"));
    assert_eq!(input("o3"), None);
}

#[test]
fn a_table_that_is_wrong_says_where() {
    let error = |models: &str| {
        let table = format!("version = \"1\"\n[models]\n{models}");
        PriceTable::parse_table(&table, UnknownPricePolicy::Reject).unwrap_err().to_string()
    };
    insta::assert_snapshot!(error("m = { input = \"cheap\" }"), @r#"
    the price table is not valid: TOML parse error at line 3, column 15
      |
    3 | m = { input = "cheap" }
      |               ^^^^^^^
    `cheap` is not an amount of dollars, such as "2.50"
    "#);
    insta::assert_snapshot!(error("m = { input = \"1\", ouput = \"2\" }"), @r#"
    the price table is not valid: TOML parse error at line 3, column 20
      |
    3 | m = { input = "1", ouput = "2" }
      |                    ^^^^^
    unknown field `ouput`, expected one of `input`, `output`, `cache_read`, `cache_write`, `cache_write_1h`, `reasoning`, `audio_input`, `audio_output`, `image_input`, `video_input`, `image_output`, `video_output`, `above_input_tokens`, `long`
    "#);
    insta::assert_snapshot!(error("m = { input = \"1\", long = { input = \"2\" } }"), @r#"
    the price table is not valid: TOML parse error at line 3, column 5
      |
    3 | m = { input = "1", long = { input = "2" } }
      |     ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
    `long` needs `above_input_tokens`, and cannot contain another `long`
    "#);
    insta::assert_snapshot!(error("m = { input = -1.5 }"), @r#"
    the price table is not valid: TOML parse error at line 3, column 15
      |
    3 | m = { input = -1.5 }
      |               ^^^^
    `-1.5` is not an amount of dollars, such as "2.50"
    "#);
}

proptest! {
    /// G9: A reservation at the highest price covers the cost, whichever part turns out to be cached or reasoning. The
    /// granted output is the most that the remaining money pays for.
    #[test]
    fn nothing_costs_more_than_was_reserved(
        price in any_price(),
        input in 0..2_000_000_u64,
        output in 0..1_000_000_u64,
        parts in [0..=100_u64, 0..=100_u64, 0..=100_u64, 0..=100_u64],
        money in 0..10_000_000_000_u64,
    ) {
        let part = |whole: u64, percent: u64| whole * percent / 100;
        let cache_read = part(input, parts[0]);
        let cache_write = part(input - cache_read, parts[1]);
        let usage = TokenUsage {
            input: Tokens(input),
            output: Tokens(output),
            cache_read: Tokens(cache_read),
            cache_write: Tokens(cache_write),
            cache_write_1h: Tokens(part(cache_write, parts[2])),
            reasoning: Tokens(part(output, parts[3])),
            ..TokenUsage::default()
        };
        prop_assert!(price.call_cost(&usage) <= price.max_cost(Tokens(input), Tokens(output)));

        let (money, input) = (Nanodollars(money), Tokens(input));
        let affordable = price.affordable_output(money, input);
        if price.max_cost(input, Tokens::ZERO) <= money && affordable.0 < u64::MAX {
            prop_assert!(price.max_cost(input, affordable) <= money);
            prop_assert!(price.max_cost(input, Tokens(affordable.0 + 1)) >= money);
        }
    }
}

fn any_price() -> impl Strategy<Value = Arc<ModelPrice>> {
    let dollars =
        || (0..100_000_000_u64).prop_map(|nanodollars| Nanodollars(nanodollars).to_string());
    let maybe = move || proptest::option::of(dollars());
    (dollars(), dollars(), maybe(), maybe(), maybe(), maybe(), 0..1_000_000_u64).prop_map(
        |(input, output, read, write, hour, reasoning, threshold)| {
            let parts = [("cache_read", read), ("cache_write", write), ("cache_write_1h", hour), ("reasoning", reasoning)];
            let parts: String = parts
                .into_iter()
                .filter_map(|(name, price)| Some(format!(", {name} = \"{}\"", price?)))
                .collect();
            let base = format!("input = \"{input}\", output = \"{output}\"{parts}");
            let table = format!(
                "version = \"1\"\n[models]\nm = {{ {base}, long = {{ above_input_tokens = {threshold}, {base} }} }}"
            );
            PriceTable::parse_table(&table, UnknownPricePolicy::Reject).unwrap().find_price("m").unwrap()
        },
    )
}

fn format_cost(prices: &PriceTable, model: &str, usage: &TokenUsage) -> String {
    prices.find_price(model).unwrap().call_cost(usage).to_string()
}
