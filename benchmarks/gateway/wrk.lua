-- Used as `wrk -s wrk.lua URL -- BODY SESSIONS`: POSTs what stands in the file BODY, by the sessions of the file SESSIONS
-- in turn (a path and a key a line), with a number of its own in place of the STAMP of each body. Prints what it saw as
-- JSON.

local STAMP = "0000000000"
local before, after, number = {}, "", 0

local function contents(path)
    local file = assert(io.open(path, "rb"))
    local read = file:read("*a")
    file:close()
    return read
end

function init(args)
    local body = contents(args[1])
    local at = assert(body:find(STAMP, 1, true), "the body has no stamp")
    after = body:sub(at + #STAMP)
    for path, key in contents(args[2]):gmatch("(%S+) (%S+)") do
        local head = "POST " .. path .. " HTTP/1.1\r\nHost: " .. wrk.host .. "\r\nAuthorization: Bearer " .. key ..
            "\r\nContent-Type: application/json\r\nContent-Length: " .. #body .. "\r\n\r\n"
        before[#before + 1] = head .. body:sub(1, at - 1)
    end
    math.randomseed(os.time())
    number = math.random(0, 8999999999)
end

function request()
    number = number + 1
    return before[number % #before + 1] .. string.format("%010d", number) .. after
end

function done(summary, latency, requests)
    local errors = summary.errors
    io.write(string.format(
        '\n{"requests": %d, "seconds": %.6f, "p50_ms": %.4f, "p99_ms": %.4f, "errors": %d}\n',
        summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
        errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
